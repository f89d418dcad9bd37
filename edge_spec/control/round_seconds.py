"""What rounds take, and what a token is worth in seconds, by the rounds of late."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import RoundStats
from edge_spec.core.outliers import without_outlier

_MEMORY = 0.98  # weight of the rounds before, in means over rounds: about the last 50 count
_AROUND_MEMORY = 0.95  # likewise, of the time outside drafting and the pass


class RoundSeconds:
    """Adds to the times of passes what a round takes around them.

    costs: of rows in the kind of pass that the last round had: its own, or one that other
    conversations share, where each is charged its part.
    """

    def __init__(self, costs: RowCosts, shared_costs: RowCosts) -> None:
        self.costs = self._own_costs = costs
        self._shared_costs = shared_costs
        self._around_s = 0.0  # of a round, outside drafting and the pass
        self._seconds, self._tokens = costs.at(1), 1.0  # means over rounds

    def at(self, rows: int) -> float:
        """Returns the seconds of a round whose pass has so many rows, without drafting."""
        return self.costs.at(rows) + self._around_s

    @property
    def plain_s(self) -> float:
        """Returns the seconds of a plain round."""
        return self.at(1)

    @property
    def token_s(self) -> float:
        """Returns the seconds of a token at the better of the last rounds' rate and plain
        decoding's."""
        return min(self._seconds / self._tokens, self.plain_s)

    def most_lost_s(self, rows: int) -> float:
        """Returns the seconds that a pass may take beyond a plain step's."""
        if rows <= self.costs.plain_rows:
            return 0.0
        return self.costs.most_further_s(rows)

    def best_gain(self, acceptance: Sequence[float], draft_token_s: float) -> float:
        """Returns the plain steps that a round of the best number of draft tokens saves, at most
        as many as there are chances: each that a draft token is right if those before it are."""
        best, reach, tokens = -1.0, 1.0, 1.0
        for depth, chance in enumerate(acceptance, start=1):
            reach *= chance
            tokens += reach
            seconds = self.at(depth + 1) + depth * draft_token_s
            best = max(best, tokens - seconds / self.plain_s)
        return best

    def observe(self, round_stats: RoundStats, asked_s: float, watched_s: float) -> float:
        """Counts a round in which asking drafters took so long, and they so long to observe it;
        returns the latter, less where the machine was busy with something else."""
        self._use(self._shared_costs if round_stats.num_sharing > 1 else self._own_costs)
        was_scaled = self.costs.is_scaled
        self.costs.observe(round_stats.num_rows, round_stats.forward_s)
        if not was_scaled:
            self._seconds = self.costs.at(1)
        around_s = round_stats.total_s - round_stats.forward_s - round_stats.draft_s
        usual_s = self.at(round_stats.num_rows)
        pass_s = without_outlier(round_stats.forward_s + around_s, usual_s)
        around_s = without_outlier(around_s, usual_s)
        self._around_s += (1 - _AROUND_MEMORY) * (around_s - self._around_s)
        watching_s = without_outlier(watched_s, usual_s)
        self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * (pass_s + asked_s + watching_s)
        self._tokens = _MEMORY * self._tokens + (1 - _MEMORY) * round_stats.num_tokens
        return watching_s

    def _use(self, costs: RowCosts) -> None:
        """Goes on from what was measured in passes of this kind."""
        if costs is not self.costs:
            before_s = self.plain_s
            self.costs = costs
            self._seconds *= self.plain_s / before_s
