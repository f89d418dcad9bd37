"""When a plain step is due, only to see what one takes: every promise is held against it."""

from __future__ import annotations

from edge_spec.core.metrics import RoundStats

_SHORTEST, _LONGEST = 64, 1024  # rounds without a plain one
_SURPRISE = 0.1  # of the expected time, beyond which the next one is due sooner


class Baseline:
    """A session that speculates in every round would never notice that its plain steps have become
    faster, say with another process's end. So one is due after many rounds without any: the rarer,
    the better known."""

    def __init__(self, plain_rows: int = 1) -> None:
        """plain_rows: of a pass that takes no longer than a plain step."""
        self._plain_rows = plain_rows
        self._interval = _SHORTEST
        self._rounds = 0  # since the last plain step

    @property
    def is_due(self) -> bool:
        return self._rounds >= self._interval

    def observe(self, round_stats: RoundStats, expected_s: float) -> None:
        """expected_s: of a plain step's pass, before this round was known."""
        if round_stats.num_rows > self._plain_rows:
            self._rounds += 1
            return
        if self.is_due:
            known = abs(round_stats.forward_s - expected_s) < _SURPRISE * expected_s
            self._interval = min(2 * self._interval, _LONGEST) if known else _SHORTEST
        self._rounds = 0
