"""The cost of rows, t(k), measured on this machine, and the gain of speculation that follows.

Estimates know how uncertain they are (Kalman 1960). The rounds of late tell what rounds take, and
what a token is worth in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from math import sqrt
from operator import mul

from edge_spec.core.config import ModelConfig
from edge_spec.core.fading_line import FadingLine
from edge_spec.core.metrics import RoundStats
from edge_spec.core.outliers import without_outlier


class Level:
    """Estimates a number by noisy observations: its mean and variance."""

    def __init__(self, mean: float, variance: float) -> None:
        self.mean = mean
        self.variance = variance

    def observe(self, value: float, noise: float) -> None:
        """noise: variance of the observation."""
        gain = self.variance / (self.variance + noise)
        self.mean += gain * (value - self.mean)
        self.variance *= 1 - gain


_MAX_DRIFT = 1.75  # of one pass: beyond it something else was going on
_REMEMBERED = 1 - 1 / 13  # weight of the passes before, in how the machine has changed
_FAMILIARITY = 12.0  # passes that the measurement counts for at first
# Weight of first and further rows changing alike: of a measured table that of 3 passes of 2 rows;
# of usual proportions that of none: rows may cost anything there.
_TOGETHER, _HARDLY_TOGETHER = 0.1, 0.002
_NOISE = 0.1  # deviation of a pass
_ROUGH = 0.2  # deviation of one width from usual proportions
_LEAST_DRIFT = 0.05
_OUTDATED = 0.75  # times the measured duration, from which on the machine was busy then
_SETTLED = 26  # passes, of which the first have little weight by now
_HOPED = 0.25  # of what further rows would cost then, by what the first row tells
_TABLE_ROWS = 64  # that are asked for in every round
_FIRST_PASSES = 4  # of which the fastest tells what a step takes: the very first one binds buffers
_LOOKED_UP = 8  # passes for which an upper bound is kept: it changes slowly
_KEPT = 0.98  # of how a width differs, after as many passes
_LEAST_S = 1e-9  # of a pass, where a coarse clock sees no time go by


class Scale:
    """The seconds of a unit of costs that are proportions until passes tell. Copies of costs have
    it in common."""

    def __init__(self, is_known: bool = True) -> None:
        self.unit_s = 1.0
        self.is_known = is_known
        self._left = 0 if is_known else _FIRST_PASSES

    def __deepcopy__(self, memo: object) -> Scale:
        return self

    def observe(self, units: float, seconds: float) -> None:
        """Counts a pass that takes so many units."""
        if self._left:
            unit_s = max(_LEAST_S, seconds / units)
            self.unit_s = min(self.unit_s, unit_s) if self.is_known else unit_s
            self.is_known = True
            self._left -= 1


class RowCosts:
    """The seconds that one pass of a session takes, by its rows.

    Between the measured widths it is interpolated, since steps are real; beyond them each row adds
    what the last ones added, or nothing where these were measured faster. A mixture of experts is
    different: its rows share experts, so the time follows the number of experts that they touch
    (`experts_touched`). Passes that are observed later correct all widths (`Drift`), for a longer
    context or a busier machine.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        num_experts: int = 0,
        experts_used: int = 0,
        plain_rows: int = 1,
        scale: Scale | None = None,
    ) -> None:
        """plain_rows: of a plain step's pass, which may be widened. scale: of seconds that are
        proportions; without it they are seconds."""
        self.plain_rows = plain_rows
        self._scale = scale or Scale()
        self._passes = 0  # observed
        self._is_shared = False
        self.drift = Drift(_TOGETHER if scale is None else _HARDLY_TOGETHER)
        self._own: dict[int, Level] = {}  # by rows, how passes of a width differ from all
        self._rough = 0.0 if scale is None else _ROUGH
        self._last_s: dict[int, float] = {}  # by rows, of the last pass that had them
        self._most: dict[int, float] = {}  # by rows, for a few passes
        self._rows = sorted(seconds)
        self._seconds = [seconds[rows] for rows in self._rows]
        self._experts: Callable[[float], float] = lambda rows: rows
        if num_experts > experts_used > 0:
            self._experts = lambda rows: experts_touched(rows, num_experts, experts_used)
        # As measured, and all that is learnt later in the time of the first row.
        self._first_s = self._measured(1)
        self._known = [self._measured(rows) / self._first_s for rows in range(_TABLE_ROWS + 1)]

    def at(self, rows: float) -> float:
        firsts = self.drift.first * (1 + self._own_mean(rows))
        return self._unit_s * (firsts + self._dearer * (self._in_table(rows) - 1))

    def further(self, rows: int) -> list[float]:
        """Returns what passes of 1, 2, ... `rows` rows take on top of one row's."""
        unit_s, dearer, first = self._unit_s, self._dearer, self.drift.first
        return [
            unit_s * (dearer * (self._in_table(each) - 1) + first * self._own_mean(each))
            for each in range(1, rows + 1)
        ]

    def most_further_s(self, rows: int) -> float:
        """Returns what a pass may take on top of one row's: a standard deviation more than is
        expected."""
        if rows not in self._most:
            self._most[rows] = self.at(rows) - self.at(1) + self.deviation_s(rows)
        return self._most[rows]

    def deviation_s(self, rows: int) -> float:
        """Returns the standard deviation of what a pass takes beyond a plain step's."""
        of_line = self.drift.deviation(0.0, self._in_table(rows) - 1)
        return self._unit_s * sqrt(of_line**2 + self._own_variance(rows))

    @property
    def plain_deviation_s(self) -> float:
        """Returns the standard deviation of what a plain step takes."""
        return self._unit_s * self.drift.deviation(1.0, 0.0)

    @property
    def _unit_s(self) -> float:
        return self._scale.unit_s * self._first_s

    def _in_table(self, rows: float) -> float:
        is_known = isinstance(rows, int) and 0 < rows <= _TABLE_ROWS
        return self._known[int(rows)] if is_known else self._measured(rows) / self._first_s

    def _own_mean(self, rows: float) -> float:
        return self._own[int(rows)].mean if rows in self._own else 0.0

    def _own_variance(self, rows: int) -> float:
        if rows in self._own:
            return self._own[rows].variance
        if not self._rough or rows <= self.plain_rows:
            return 0.0
        return (self._rough * self._in_table(rows)) ** 2

    @property
    def _dearer(self) -> float:
        """Returns the present price of further rows over the measured one. Where the machine was
        busy when they were measured, only a pass that has some can show what they take now: until
        then they are taken to be cheap, so that one is tried."""
        drift = self.drift
        guessed = self.is_outdated and not drift.knows_further
        return _HOPED * drift.further if guessed else drift.further

    @property
    def is_outdated(self) -> bool:
        """Says whether a pass is so much faster by now that the machine was busy when it was
        measured: a longer context makes it slower only."""
        is_faster = self._passes >= _SETTLED and self.drift.first < _OUTDATED
        return is_faster and not self._is_shared

    @property
    def measured(self) -> dict[int, float]:
        """Returns what it was made of, seconds by rows, without what was observed later."""
        unit_s = self._scale.unit_s
        return {rows: unit_s * each for rows, each in zip(self._rows, self._seconds, strict=True)}

    @property
    def is_scaled(self) -> bool:
        """Says whether these are seconds, as measured or after a first pass."""
        return self._scale.is_known

    @property
    def slope(self) -> float:
        """Returns what one more row costs, the mean over the measured widths."""
        if len(self._rows) < 2:
            return 0.0
        wider = self._rows[-1] - self._rows[0]
        return max(0.0, self.at(self._rows[-1]) - self.at(self._rows[0])) / wider

    def shared(self) -> RowCosts:
        """Returns a copy for passes that several conversations share: each is charged its part of
        them, which is less than a pass of its own."""
        copied = deepcopy(self)
        copied._is_shared = True
        return copied

    def padded(self, widths: Sequence[int]) -> RowCosts:
        """Returns the costs of passes that are widened to the next of these ascending widths."""
        wider = {
            rows: self.at(next(width for width in widths if width >= rows)) / self._scale.unit_s
            for rows in range(1, widths[-1] + 1)
        }
        return RowCosts(wider, plain_rows=widths[0], scale=self._scale)

    def widest_free(self, more: float = 0.25) -> int:
        """Returns the widest measured pass that takes at most `more` of one row's time on top of
        it."""
        return max(rows for rows in self._rows if self.at(rows) <= (1 + more) * self.at(1))

    def observe(self, rows: int, seconds: float) -> None:
        if self._passes % _LOOKED_UP == 0 or self._passes < _LOOKED_UP:
            self._most.clear()
            for own in self._own.values():  # a width that seems dear is not seen again otherwise
                own.mean *= _KEPT
        self._passes += 1
        if rows <= self.plain_rows or not self._scale.is_known:
            self._scale.observe(self._measured(rows), seconds)
        firsts = self._believed(rows, seconds) / self._unit_s
        further = self._in_table(rows) - 1
        if rows in self._own or self._own_variance(rows):
            line = self.drift.first + self.drift.further * further
            noise = self.drift.deviation(1.0, further) ** 2 + (_NOISE * line) ** 2
            own = self._own.setdefault(rows, Level(0.0, self._own_variance(rows)))
            own.observe(firsts / self.drift.first - line / self.drift.first, noise)
            firsts -= self.drift.first * own.mean
        self.drift.observe(further, firsts)

    def _believed(self, rows: int, seconds: float) -> float:
        """Returns the seconds of a pass without what something else has added to it."""
        expected = self.at(rows)
        # One slow pass says little: the first has memory to take, any may wait for other processes.
        last_s, self._last_s[rows] = self._last_s.get(rows, expected), seconds
        seconds = min(seconds, max(last_s, expected))
        more_s = 3 * self.deviation_s(rows) if self._rough else 0.0
        seconds = max(seconds, min(expected / _MAX_DRIFT, expected - more_s))
        return min(seconds, max(expected * _MAX_DRIFT, expected + more_s))

    def _measured(self, rows: float) -> float:
        if len(self._rows) == 1:
            return self._seconds[0]
        right = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        low, high = (self._experts(self._rows[i]) for i in (right - 1, right))
        share = (self._experts(rows) - low) / (high - low)
        more_s = self._seconds[right] - self._seconds[right - 1]
        if share > 1:
            return self._seconds[right] + max(0.0, more_s) * (share - 1)
        return self._seconds[right - 1] + more_s * share


class Drift:
    """Learns how many times dearer a pass's first row and its further rows have become.

    They drift apart: a long context makes every row read more, another process takes the time of
    those that only compute. Where the widths seen tell little about one of the two, it follows the
    other.
    """

    def __init__(self, together: float = _TOGETHER) -> None:
        """together: weight of both changing alike."""
        self._together = together
        self.first = self.further = 1.0
        self.knows_further = False  # by passes of late, rather than by how the first row changes
        # y: the time of a pass, x: that of its further rows as measured, both in first rows.
        self._line = FadingLine(_REMEMBERED)
        self._line.add(0.0, 1.0, _FAMILIARITY)

    def observe(self, further: float, seconds: float) -> None:
        """Counts a pass, in the measured seconds of its first row; further: what all of its other
        rows took when they were measured."""
        self._line.observe(further, seconds)
        self.knows_further = self._line.spread >= _TOGETHER
        # A pass of 0 seconds at x = -1 lies on every line whose two parts changed alike.
        first, self.further = self._line.fit(-1.0, self._together, least_slope=_LEAST_DRIFT)
        self.first = max(_LEAST_DRIFT, first)

    def deviation(self, first: float, further: float) -> float:
        """Returns the standard deviation of what so many first and further rows take, in the
        measured seconds of a first row."""
        return _NOISE * self._line.deviation(further, -1.0, self._together, first)


def costs_of(
    config: ModelConfig,
    seconds: Mapping[int, float],
    scale: Scale | None = None,
) -> RowCosts:
    return RowCosts(seconds, config.num_experts, config.experts_used, scale=scale)


def experts_touched(rows: float, num_experts: int, experts_used: int) -> float:
    """Returns how many of a layer's experts `rows` tokens are expected to need, `experts_used`
    each, if they choose independently. Real texts choose alike more often: it is an upper bound
    then."""
    untouched: float = (1 - experts_used / num_experts) ** rows
    return num_experts * (1 - untouched)


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Returns the tokens of one round, the target's own included; acceptance: of each draft token
    of a chain, given that the one before it was accepted (Leviathan et al. 2023, equation 1, where
    all are equal)."""
    accepted: float = sum(accumulate(acceptance, mul))
    return 1 + accepted


def forecast_speedup(acceptance: Sequence[float], costs: RowCosts, draft_s: float) -> float:
    """Returns the rate of a chain with this acceptance over plain decoding's. draft_s: seconds for
    all its draft tokens."""
    round_s = draft_s + costs.at(len(acceptance) + 1)
    return expected_tokens(acceptance) * costs.at(1) / round_s


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
