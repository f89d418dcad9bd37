"""Drafting for the next round while the target verifies this one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from statistics import fmean, median
from threading import Event

from edge_spec.core.metrics import NoOverlap, RoundStats
from edge_spec.core.outliers import without_outlier
from edge_spec.drafters.protocol import Drafter

_BLOCK = 8  # rounds in a row with it, or without
_RECENT = 64  # rounds of one kind that are remembered
_ENOUGH = 48  # rounds compared, with it and without, before anything is said
HYSTERESIS = 0.03  # of a round's time, by which the other way has to be faster
_RETRY_BLOCKS = 16  # of which one is of the other way: 6 % of the rounds

_Kind = tuple[int, tuple[str, ...]]


class OverlappedDrafting:
    """Lets drafters draft on, in one thread for all rounds, as long as a block runs.

    trial: says when; None: in every round. why_not: why they never do; None: they may.
    reads_prompts: they read a prompt while the target does, on a device of their own. Drafters and
    what they share with the target's thread, the sampler above all, are used by one thread at a
    time: the block has to leave them alone.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter] = (),
        trial: OverlapTrial | None = None,
        why_not: NoOverlap | None = None,
        reads_prompts: bool = False,
    ) -> None:
        self.reads_prompts = reads_prompts
        self.was_ready = False  # whether draft tokens of this round were made in the one before
        self.why_not = why_not  # why they do not draft on in this round; None: they may
        self.goes_on = False  # whether they draft on in this round
        self._drafters = drafters if why_not is None else ()
        self._trial = trial
        self._thread = ThreadPoolExecutor(1, "edge-spec-draft")
        self._running: Future[None] | None = None
        self._stopped = Event()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Ends when the block and at most one pass of a draft have. Raises what a drafter raised
        that is not guarded."""
        ready = self.begin_round()
        if not ready:
            yield
            return
        self._stopped.clear()
        self._running = self._thread.submit(self._anticipate, ready)
        try:
            yield
        finally:
            self._stop()

    def begin_round(self) -> Sequence[Drafter]:
        """Returns the drafters that are to draft on in this round."""
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
            wait([self._running])  # nobody may use the draft before its pass has ended
            raise


class OverlapTrial:
    """Runs blocks of rounds with and without it, and then the faster way, with a block of the other
    now and then, since texts and machines change.

    Compared are rounds that verified as many draft tokens of the same drafters: what overlap
    changes is their time, and their number would hide that. What was drafted in advance is right in
    some rounds and useless in others, so it is the mean that counts, without outliers.
    """

    def __init__(self) -> None:
        self.on = True
        self._faster: bool | None = None  # with it; None: not known yet
        self._num_rounds = 0
        self._seconds: dict[bool, dict[_Kind, deque[float]]] = {
            way: defaultdict(lambda: deque(maxlen=_RECENT)) for way in (False, True)
        }

    @property
    def why_not(self) -> NoOverlap | None:
        """Why this round is one without it, if it is."""
        if self.on:
            return None
        return NoOverlap.SLOWER if self._faster is False else NoOverlap.COMPARISON

    def observe(self, round_stats: RoundStats) -> None:
        """A round that ran as `on` said; rounds without a draft token tell nothing."""
        if round_stats.plain_reason is not None:
            return
        block, place = divmod(self._num_rounds, _BLOCK)
        self._num_rounds += 1
        if place:  # the first one's draft tokens were made in the block before
            kind = round_stats.num_draft_tokens, tuple(sorted(round_stats.by_drafter))
            self._seconds[self.on][kind].append(round_stats.total_s)
        if place == _BLOCK - 1:
            self._choose(block + 1)

    def _choose(self, block: int) -> None:
        """Choose the way of the block with this number."""
        ratio = self._ratio()
        if ratio is not None:
            self._faster = ratio < (1 + HYSTERESIS if self._faster else 1 - HYSTERESIS)
        if self._faster is None:
            self.on = block % 2 == 0
        else:
            self.on = self._faster is not (block % _RETRY_BLOCKS == 0)

    def _ratio(self) -> float | None:
        """The time of rounds with it over that of the same rounds without; None: too few."""
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
