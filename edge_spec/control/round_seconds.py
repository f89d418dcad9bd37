"""What rounds take, and what a token is worth in seconds, by the rounds of late."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import RoundStats
from edge_spec.core.outliers import without_outlier

# Weight of the rounds before, in means over rounds: about the last 12 count. With 50, a model
# drafts too many tokens at first, as if time could not be spent better
# (benchmarks/results/sibling.json).
_MEMORY = 0.92
_AROUND_MEMORY = 0.95  # likewise, of what comes around passes
_ANCHORED = 8  # plain steps after wider passes, for which one after a plain one is remembered


class RoundSeconds:
    """Adds to the times of passes what a round takes around them, and what a plain step takes more
    where the pass before had more rows: runtimes that keep the graph of the last pass build it
    again then, which is a fifth of a step of a small model.

    costs: of rows in the kind of pass that the last round had: its own, or one that other
    conversations share, where each is charged its part. plain_s: seconds of a plain round. token_s:
    of a token at the better of the last rounds' rate and plain decoding's. row_s: of one more row.
    """

    def __init__(self, costs: RowCosts, shared_costs: RowCosts) -> None:
        self.costs = self._own_costs = costs
        self._shared_costs = shared_costs
        self._around_s = 0.0  # of a round, outside drafting and the pass
        # Of plain steps after others, and after a pass of more rows, beyond what is expected.
        self._alone_s = self._after_s = 0.0
        self._switches = 1.0  # share of passes of more rows that a plain step comes after
        self._anchored = 0  # plain steps after wider passes for which that is remembered
        self._was_wider = False  # the last pass
        self._seconds, self._tokens = costs.at(1), 1.0  # means over rounds
        self._look()

    def at(self, rows: int) -> float:
        """Returns the seconds of a round whose pass has so many rows, without drafting; what the
        next one takes more for that belongs to it."""
        return self.costs.at(rows) + self._around_s + self._switched_s(rows)

    def most_lost_s(self, rows: int) -> float:
        """Returns the seconds that a pass may take beyond a plain step's."""
        if rows <= self.costs.plain_rows:
            return 0.0
        return self.costs.most_further_s(rows) + self._switched_s(rows)

    def rows_within(self, seconds: float, most: int) -> int:
        """Returns how many rows, of 1 to `most`, a pass may have that takes at most so long beyond
        a plain step; 1 where there is no time for any other."""
        return next((r for r in range(most, 1, -1) if self.most_lost_s(r) <= seconds), 1)

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

    def observe(self, round_stats: RoundStats, asked_s: float) -> None:
        """Counts a round in which asking drafters took so long."""
        self._use(self._costs_of(round_stats))
        around_s = round_stats.total_s - round_stats.forward_s - round_stats.draft_s
        if not self.costs.is_scaled:
            self.costs.observe(round_stats.num_rows, round_stats.forward_s)
            self._seconds = self.costs.at(1)
        else:
            self.costs.observe(round_stats.num_rows, self._without_switch(round_stats))
            usual_s = self.at(round_stats.num_rows)
            self._around_s = _faded(self._around_s, without_outlier(around_s, usual_s))
        self._was_wider = round_stats.num_rows > self.costs.plain_rows
        pass_s = without_outlier(round_stats.forward_s + around_s, self.at(round_stats.num_rows))
        self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * (pass_s + asked_s)
        self._tokens = _MEMORY * self._tokens + (1 - _MEMORY) * round_stats.num_tokens
        self._look()

    def is_usual(self, round_stats: RoundStats) -> bool:
        """Says whether its pass was of the kind that the last round had."""
        return self._costs_of(round_stats) is self.costs

    def rest(self, rounds: int) -> None:
        """Counts plain rounds that were not looked at."""
        left = _MEMORY**rounds
        self._seconds = left * self._seconds + (1 - left) * self.plain_s
        self._tokens = left * self._tokens + (1 - left)
        self._was_wider = False
        self._look()

    def _look(self) -> None:
        """Takes up what is asked for many times in a round."""
        self.plain_s = self.costs.at(1) + self._around_s
        self.token_s = min(self._seconds / self._tokens, self.plain_s)
        self.row_s = self.costs.slope

    def _without_switch(self, round_stats: RoundStats) -> float:
        """Returns the seconds that the pass would have taken after another one of its width."""
        seconds, is_plain = round_stats.forward_s, round_stats.num_rows <= self.costs.plain_rows
        if self._was_wider:
            self._switches = _faded(self._switches, float(is_plain))
        if not is_plain:
            return seconds
        plain_s = self.costs.at(1)
        more_s = min(max(seconds - plain_s, -plain_s), plain_s)
        if not self._was_wider:
            self._anchored, self._alone_s = _ANCHORED, _faded(self._alone_s, more_s)
            return seconds
        # Where no plain step comes after another one, nothing tells what it takes by itself.
        self._anchored = max(0, self._anchored - 1)
        self._after_s = _faded(self._after_s, more_s if self._anchored else self._alone_s)
        return seconds - self._switch_s

    @property
    def _switch_s(self) -> float:
        return max(0.0, self._after_s - self._alone_s)

    def _switched_s(self, rows: int) -> float:
        return self._switches * self._switch_s if rows > self.costs.plain_rows else 0.0

    def _costs_of(self, round_stats: RoundStats) -> RowCosts:
        return self._shared_costs if round_stats.num_sharing > 1 else self._own_costs

    def _use(self, costs: RowCosts) -> None:
        """Goes on from what was measured in passes of this kind."""
        if costs is not self.costs:
            before_s, self.costs = self.plain_s, costs
            self._look()
            self._seconds *= self.plain_s / before_s


def _faded(mean: float, value: float) -> float:
    return _AROUND_MEMORY * mean + (1 - _AROUND_MEMORY) * value
