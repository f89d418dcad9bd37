"""Plain steps that are due only to see what one takes: every promise is held against them."""

from __future__ import annotations

from edge_spec.core.metrics import RoundStats
from edge_spec.core.spaced_retries import SpacedRetries

_SHORTEST, _LONGEST = 64, 1024  # rounds without a plain one
_SURPRISE = 0.1  # of the expected time, beyond which the next one is due sooner


class Baseline:
    """A session that speculates in every round would never notice that its plain steps have become
    faster, say with another process's end. So one is due after many rounds without any: the rarer,
    the better known."""

    def __init__(self, plain_rows: int = 1) -> None:
        """plain_rows: of a pass that takes no longer than a plain step."""
        self._plain_rows = plain_rows
        self._rests = SpacedRetries(_SHORTEST, _LONGEST)  # in rounds, of which none is plain
        self._rests.begin()

    @property
    def is_due(self) -> bool:
        return not self._rests.resting

    def observe(self, round_stats: RoundStats, expected_s: float) -> None:
        """expected_s: of a plain step's pass, before this round was known."""
        if round_stats.num_rows > self._plain_rows:
            self._rests.count()
            return
        if self.is_due:
            known = abs(round_stats.forward_s - expected_s) < _SURPRISE * expected_s
            (self._rests.lengthen if known else self._rests.reset)()
        self._rests.begin()
