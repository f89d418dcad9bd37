"""Chooses how many threads make a pass, beside whatever else the machine is doing.

The threads of a pass wait for each other many times. Where another process takes one of the cores,
all wait for the thread that was there, and fewer threads are faster. The passes tell that best:
where they have become slow, a smaller number is tried for a few, now and then a larger one again,
and the faster one stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from edge_spec.core.spaced_retries import SpacedRetries

_SLOW = 1.4  # times a pass's usual duration, from which on fewer threads are tried
_BETTER = 0.85  # of the duration before, that a trial has to take at most
_UNCOUNTED = 2  # the first passes of a width, which bind buffers
_WATCHED = 16  # passes that tell whether the machine is busy
_TRIED = 6  # passes of a trial, after one that is not counted
_FIRST_REST, _LONGEST_REST = 64, 512  # passes between two trials
_AGEING = 1.002  # by which the usual duration grows with each pass, as a text does


class ThreadGovernor:
    """Chooses among `num_threads` and fewer by the durations of one session's passes, each over the
    usual one of its width. Means are compared: a few passes that wait long are to be avoided."""

    def __init__(
        self,
        num_threads: int,
        steps: int | None = None,
        is_ready: Callable[[int], bool] = lambda threads: True,
    ) -> None:
        """steps: that it may go down. is_ready: whether passes may have that number of threads by
        now; asked before each trial."""
        self.threads = num_threads  # of the next pass
        self._ladder = _ladder(num_threads)[: None if steps is None else steps + 1]
        self._is_ready = is_ready
        self._rung = 0
        self._usual: dict[int, float] = {}  # seconds by rows
        self._seen: Counter[int] = Counter()  # passes by rows
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WATCHED)  # rows, seconds
        self._trial: list[tuple[int, float]] | None = None
        self._tried_rung = 0
        # In passes, before the next trial: the first ones bind buffers.
        self._rests = SpacedRetries(_FIRST_REST, _LONGEST_REST, resting=_WATCHED)
        self._alike = 0  # passes since the last trial

    def observe(self, rows: int, seconds: float) -> int:
        """Return the threads of the next pass."""
        if self._trial is not None:
            if self._seen[rows] > _UNCOUNTED:
                self._trial.append((rows, seconds))
                if len(self._trial) > _TRIED or self._is_lost(self._trial[1:]):
                    self._judge(self._trial[1:])
            return self.threads
        usual = self._usual.get(rows, seconds)
        self._usual[rows] = min((usual + seconds) / 2, usual * _AGEING)
        self._seen[rows] += 1
        if self._seen[rows] <= _UNCOUNTED:
            return self.threads
        self._recent.append((rows, seconds))
        self._rests.count()
        self._alike += 1
        if len(self._recent) == _WATCHED and not self._rests.resting:
            self._consider()
        return self.threads

    def _consider(self) -> None:
        """Begins a trial where one may pay: of more threads now and then, of fewer where passes
        have become slow."""
        if self._rung and self._alike >= self._rests.length:
            self._try(self._rung - 1)
        elif self._rung + 1 < len(self._ladder) and self._is_slow():
            self._try(self._rung + 1)

    def _is_slow(self) -> bool:
        """Return whether passes have been slow for a while: one that waited long is no reason."""
        passes = list(self._recent)
        halves = passes[: _WATCHED // 2], passes[_WATCHED // 2 :]
        return min(map(self._slowness, halves)) > _SLOW

    def _try(self, rung: int) -> None:
        if not self._is_ready(self._ladder[rung]):
            return
        self._trial, self._tried_rung, self._alike = [], rung, 0
        self.threads = self._ladder[rung]

    def _is_lost(self, tried: Sequence[tuple[int, float]]) -> bool:
        """Return whether a trial has taken longer than all of it may: one pass may wait long."""
        most = _BETTER * _TRIED * self._slowness(self._recent)
        return bool(tried) and len(tried) * self._slowness(tried) > most

    def _judge(self, tried: Iterable[tuple[int, float]]) -> None:
        """Stays at the rung that was tried, or goes back to the one before."""
        if self._slowness(tried) < _BETTER * self._slowness(self._recent):
            self._rung = self._tried_rung
            self._rests.resting = 0
            self._rests.reset()
        else:
            self._rests.rest()
        self._recent.clear()
        self._trial = None
        self.threads = self._ladder[self._rung]

    def _slowness(self, passes: Iterable[tuple[int, float]]) -> float:
        """The mean of their durations over the usual ones."""
        ratios = [
            seconds / self._usual[rows] for rows, seconds in passes if self._usual.get(rows, 0.0)
        ]
        return sum(ratios) / len(ratios) if ratios else 1.0


def _ladder(num_threads: int) -> list[int]:
    """Numbers of threads to choose from, the most first: steps of a quarter, of one at least."""
    steps = [num_threads]
    while steps[-1] > 1:
        steps.append(steps[-1] - max(1, steps[-1] // 4))
    return steps
