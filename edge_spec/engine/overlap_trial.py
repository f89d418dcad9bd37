"""Measures whether drafting while the target verifies is faster than drafting after it."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import fmean, median

from edge_spec.core.metrics import NoOverlap, RoundStats
from edge_spec.core.outliers import without_outlier
from edge_spec.core.spaced_retries import SpacedRetries

_BLOCK = 8  # rounds in a row with it, or without
_RECENT = 64  # rounds of one kind that are remembered
_ENOUGH = 48  # rounds compared, with it and without, before anything is said
HYSTERESIS = 0.03  # of a round's time, by which the other way has to be faster
_RETRY_BLOCKS = 16  # of the faster way, for each block of the other: 6 % of the rounds

_Kind = tuple[int, tuple[str, ...]]


class OverlapTrial:
    """Runs blocks of rounds with and without it, and then the faster way, with a block of the other
    now and then, since texts and machines change.

    Compared are rounds that verified as many draft tokens of the same drafters: what overlap
    changes is their time, and their number would hide that. What was drafted in advance is right in
    some rounds and useless in others, so it is the mean that counts, without outliers.

    begins: whether the first block is one with it; one without is right where the two devices were
    measured to slow each other down by more than overlap can win.
    """

    def __init__(self, begins: bool = True) -> None:
        self.on = begins
        self._faster: bool | None = None if begins else False  # with it; None: not known yet
        self._left = _BLOCK  # rounds of the block
        self._rests = SpacedRetries(_RETRY_BLOCKS, _RETRY_BLOCKS)  # of the slower way, in blocks
        self._rests.begin()
        self._first = True  # of a block: its draft tokens were made in the one before
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
        if not self._first:
            kind = round_stats.num_draft_tokens, tuple(sorted(round_stats.by_drafter))
            self._seconds[self.on][kind].append(round_stats.total_s)
        self._first = False
        self._left -= 1
        if not self._left:
            self._judge()
            self._next_block()

    def _next_block(self) -> None:
        self._left, before = _BLOCK, self.on
        if self._faster is None:
            self.on = not self.on
        elif self.on is not self._faster or self._rests.resting:
            self.on = self._faster
            self._rests.count()
        else:
            self.on = not self._faster
            self._rests.rest()
        self._first = self.on is not before

    def _judge(self) -> None:
        ratio = self._ratio()
        if ratio is None:
            return
        if self._faster:
            self._faster = ratio < 1 + HYSTERESIS
        else:
            self._faster = ratio < 1 - HYSTERESIS

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
