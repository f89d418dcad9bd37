"""Choose a pass's number of threads by what else the machine runs.

Threads of a pass wait for each other many times. If another process takes a core, all wait for that
thread, at times a tenth of a second, and fewer threads are faster. When passes become slow, a few
try fewer threads; more are tried now and then. The faster number stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from edge_spec.core.spaced_retries import SpacedRetries

_SLOW = 1.4  # of a pass's usual duration: fewer threads are tried
_BETTER = 0.85  # of the duration before, at most, for a trial to win
_UNCOUNTED = 2  # first passes of a width, which bind buffers
_WATCHED = 16  # passes that show whether the machine is busy
_TRIED = 6  # passes of a trial, after an uncounted one
_FIRST_REST, _LONGEST_REST = 64, 256  # passes between two trials
_AGEING = 1.002  # of the usual duration with each pass, as the text grows


class ThreadGovernor:
    """Chooses up to `num_threads` by durations of one session's passes, relative to the usual one,
    near the best, of their width. Means are compared, since the aim is to avoid the few passes that
    wait long."""

    def __init__(
        self,
        num_threads: int,
        steps: int | None = None,
        is_ready: Callable[[int], bool] = lambda threads: True,
    ) -> None:
        """steps: most steps down. is_ready: whether passes may use so many threads now; called
        before each trial."""
        self.threads = num_threads  # of the next pass
        self._ladder = _ladder(num_threads)[: None if steps is None else steps + 1]
        self._is_ready = is_ready
        self._rung = 0
        self._usual: dict[int, float] = {}  # seconds by rows
        self._seen: Counter[int] = Counter()  # passes by rows
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WATCHED)  # rows, seconds
        self._trial: list[tuple[int, float]] | None = None
        self._tried_rung = 0
        # Passes until the next trial: the first ones bind buffers.
        self._rests = SpacedRetries(_FIRST_REST, _LONGEST_REST, resting=_WATCHED)
        self._alike = 0  # passes since the last trial

    def observe(self, rows: int, seconds: float) -> int:
        """Record a pass and return the threads of the next one."""
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
            self._consider(seconds > _SLOW * usual)
        return self.threads

    def _consider(self, is_slow: bool) -> None:
        """Try more threads now and then, or fewer when passes are slow. is_slow: the last one."""
        if self._rung and self._alike % _WATCHED == 0 and self._alike >= self._rests.length:
            self._try(self._rung - 1)
        elif is_slow and self._rung + 1 < len(self._ladder) and self._is_slow():
            self._try(self._rung + 1)

    def _is_slow(self) -> bool:
        passes = list(self._recent)
        halves = passes[: _WATCHED // 2], passes[_WATCHED // 2 :]
        return min(map(self._slowness, halves)) > _SLOW

    def _try(self, rung: int) -> None:
        if not self._is_ready(self._ladder[rung]):
            return
        self._trial, self._tried_rung, self._alike = [], rung, 0
        self.threads = self._ladder[rung]

    def _is_lost(self, tried: Sequence[tuple[int, float]]) -> bool:
        """Return whether a trial already took longer than all of it may."""
        most = _BETTER * _TRIED * self._slowness(self._recent)
        return bool(tried) and len(tried) * self._slowness(tried) > most

    def _judge(self, tried: Iterable[tuple[int, float]]) -> None:
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
        ratios = [
            seconds / self._usual[rows] for rows, seconds in passes if self._usual.get(rows, 0.0)
        ]
        return sum(ratios) / len(ratios) if ratios else 1.0


def _ladder(num_threads: int) -> list[int]:
    """Return numbers of threads, descending by a quarter, at least by one."""
    steps = [num_threads]
    while steps[-1] > 1:
        steps.append(steps[-1] - max(1, steps[-1] // 4))
    return steps
