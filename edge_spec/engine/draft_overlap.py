"""Drafting for the next round while the target verifies this one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from statistics import fmean, median
from threading import Event
from typing import TypeVar

from edge_spec.core.metrics import NoOverlap, RoundStats
from edge_spec.core.outliers import without_outlier
from edge_spec.drafters.protocol import Drafter

_BLOCK = 8  # successive rounds in one mode
_RECENT = 64  # remembered rounds of one kind
_ENOUGH = 48  # rounds compared before deciding
HYSTERESIS = 0.03  # share of a round's time that the other mode must win
_RETRY_BLOCKS = 16  # one in these uses the other mode: 6% of the rounds

_Kind = tuple[int, tuple[str, ...]]
_Plan = TypeVar("_Plan")
_Scored = TypeVar("_Scored")


class OverlappedDrafting:
    """Lets drafters anticipate the next round in a thread while the target scores this one.

    trial: decides when; None: always. why_not: reason for never, or None. reads_prompts: drafters
    read a prompt while the target does, on their own device. The pass must not touch the drafters
    or what they share with its thread, such as the sampler.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter] = (),
        trial: OverlapTrial | None = None,
        why_not: NoOverlap | None = None,
        reads_prompts: bool = False,
    ) -> None:
        self.reads_prompts = reads_prompts
        self.was_ready = False  # this round's draft tokens were made in the last one
        self.why_not = why_not  # reason not to overlap this round, or None
        self.goes_on = False  # this round overlaps
        self._drafters = drafters if why_not is None else ()
        self._trial = trial
        self._thread = ThreadPoolExecutor(1, "edge-spec-draft")
        self._running: Future[None] | None = None
        self._stopped = Event()

    def beside(self, forward: Callable[[_Plan], _Scored], plan: _Plan) -> _Scored:
        """Return `forward(plan)`, drafting meanwhile; then wait for at most one draft pass. Raises
        the error of an unguarded drafter."""
        ready = self.begin_round() if self._drafters else ()
        if not ready:
            return forward(plan)
        self._stopped.clear()
        self._running = self._thread.submit(self._anticipate, ready)
        try:
            return forward(plan)
        finally:
            self._stop()

    def begin_round(self) -> Sequence[Drafter]:
        """Return the drafters that anticipate during this round."""
        ready = [drafter for drafter in self._drafters if drafter.anticipates]
        self.was_ready = any(drafter.was_ready for drafter in ready)
        if self._trial is not None:
            self.why_not = self._trial.why_not if ready else None
        self.goes_on = bool(ready) and self.why_not is None
        return ready if self.goes_on else ()

    def observe(self, round_stats: RoundStats) -> None:
        if self._trial is not None:
            self._trial.observe(round_stats)

    def close(self) -> None:
        self._stopped.set()
        self._thread.shutdown()

    def _anticipate(self, drafters: Sequence[Drafter]) -> None:
        for drafter in drafters:
            drafter.anticipate(self._stopped.is_set)

    def _stop(self) -> None:
        assert self._running is not None
        try:
            self._stopped.set()
            self._running.result()
        except KeyboardInterrupt:
            wait([self._running])  # the draft must stay unused until its pass has ended
            raise


class OverlapTrial:
    """Alternates blocks of rounds with and without overlap, then keeps the faster mode.

    Retries the other mode now and then. Compares rounds with equally many draft tokens of the same
    drafters, since overlap changes their time only. Uses means without outliers: anticipated tokens
    help in some rounds and not in others.
    """

    def __init__(self) -> None:
        self.on = True
        self._faster: bool | None = None  # with overlap; None: unknown
        self._num_rounds = 0
        self._seconds: dict[bool, dict[_Kind, deque[float]]] = {
            way: defaultdict(lambda: deque(maxlen=_RECENT)) for way in (False, True)
        }

    @property
    def why_not(self) -> NoOverlap | None:
        if self.on:
            return None
        return NoOverlap.SLOWER if self._faster is False else NoOverlap.COMPARISON

    def observe(self, round_stats: RoundStats) -> None:
        """Count a round that ran as `on` says; rounds without draft tokens are ignored."""
        if round_stats.plain_reason is not None:
            return
        block, place = divmod(self._num_rounds, _BLOCK)
        self._num_rounds += 1
        if place:  # its draft tokens were made in the previous block
            kind = round_stats.num_draft_tokens, tuple(sorted(round_stats.by_drafter))
            self._seconds[self.on][kind].append(round_stats.total_s)
        if place == _BLOCK - 1:
            self._choose(block + 1)

    def _choose(self, block: int) -> None:
        ratio = self._ratio()
        if ratio is not None:
            self._faster = ratio < (1 + HYSTERESIS if self._faster else 1 - HYSTERESIS)
        if self._faster is None:
            self.on = block % 2 == 0
        else:
            self.on = self._faster is not (block % _RETRY_BLOCKS == 0)

    def _ratio(self) -> float | None:
        """Return the time with overlap over that without, for equal rounds; None if too few."""
        rounds, with_s, without_s = 0, 0.0, 0.0
        for kind, seconds in self._seconds[True].items():
            others = self._seconds[False].get(kind, ())
            count = min(len(seconds), len(others))
            if count:
                rounds += count
                with_s += count * _mean(seconds)
                without_s += count * _mean(others)
        return with_s / without_s if rounds >= _ENOUGH and without_s else None


def _mean(seconds: deque[float] | tuple[float, ...]) -> float:
    usual_s = median(seconds)
    return fmean(without_outlier(each, usual_s) for each in seconds)
