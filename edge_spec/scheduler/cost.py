"""The cost of a pass by its rows, t(k), and of a round around its pass.

Both are measured, then corrected by every pass. A machine slows down for all widths at once, while
the price of extra rows rarely changes, so the two are learnt separately, pace within a few passes,
each with its uncertainty (Kalman 1960).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite, sqrt
from operator import mul

from edge_spec.core.metrics import RoundStats
from edge_spec.core.outliers import OUTLIER, without_outlier

_NOISE = 0.1  # standard deviation of a pass, relative to its time
# Prior variances, relative to the table: first row, price of extra rows, one width's own deviation;
# if measured for this model, and if usual values.
_FIRST, _PRICE, _OWN = 0.01, 0.1, 0.0
_ROUGH_PRICE, _ROUGH_OWN = 1.0, 0.06
# Variance added per pass, as machines and texts change: all rows, extra rows.
_PACE_CHANGES, _PRICE_CHANGES = 1e-3, 5e-4
_JUMP = 9.0  # variances; a larger error means a new pace
_SLOW = 1.4  # times the expected time; such a pass is slow
_MOST_CHANGE = 8.0  # factor, per pass
_OUTDATED, _HOPED = 0.7, 0.25  # see `_doubt_table`
_IMPOSSIBLE = 0.2  # times the expected time; a faster pass is a clock error
_RECALLED = 4  # passes per width that earlier sessions count for
_LEAST_PRICE = 0.05
# What remains of too high a price per plain step, and of a width's own deviation per pass, so that
# expensive rows get tried again.
_FADING = 0.998
_TABLE_ROWS = 64  # looked up in every round
_LEAST_S = 1e-9  # for coarse clocks


@dataclass
class _Line:
    """The time of a pass, `first + price * further`, in first rows of the table. further: what a
    width adds by the table. of_*: variances of both and their covariance."""

    of_price: float
    of_first: float = _FIRST
    of_both: float = 0.0
    first: float = 1.0
    price: float = 1.0

    def variance(self, further: float) -> float:
        return self.of_first + 2 * further * self.of_both + further**2 * self.of_price

    def scale(self, factor: float) -> None:
        self.first *= factor
        self.price *= factor

    def change(self, variance: float) -> None:
        """Add the variance of a factor on all rows."""
        self.of_first += variance * self.first**2
        self.of_both += variance * self.first * self.price
        self.of_price += variance * self.price**2

    def learn(self, error: float, further: float, of_all: float) -> None:
        """Update both from a pass, each by its share of the error. of_all: the error's variance."""
        with_first = self.of_first + further * self.of_both
        with_price = self.of_both + further * self.of_price
        self.first = max(_LEAST_PRICE, self.first + with_first / of_all * error)
        self.price = max(_LEAST_PRICE, self.price + with_price / of_all * error)
        self.of_first -= with_first**2 / of_all
        self.of_both -= with_first * with_price / of_all
        self.of_price -= with_price**2 / of_all

    def fade(self) -> None:
        """Move a price above the table's towards it."""
        if self.price > self.first:
            self.price = self.first + _FADING * (self.price - self.first)


class RowCosts:
    """The seconds of one pass of a session by its rows. Interpolated between measured widths.
    Beyond them each row adds what the last ones added, at least 0."""

    def __init__(
        self,
        seconds: Mapping[int, float],
        plain_rows: int = 1,
        is_measured: bool = True,
    ) -> None:
        """plain_rows: width of a plain step, which may be padded. is_measured: False where
        `seconds` are only usual proportions."""
        self.plain_rows = plain_rows
        self.is_scaled = is_measured  # times are seconds: measured, or scaled by a first pass
        self._rows = sorted(seconds)
        self._seconds = [seconds[rows] for rows in self._rows]
        self._table_first = self._first_s = self._measured(1)  # the second follows the machine
        # In first rows, like everything below.
        self._table = [self._measured(rows) / self._first_s for rows in range(_TABLE_ROWS + 1)]
        self.is_unsure = False  # the next pass should be a plain step
        self._line = _Line(_PRICE if is_measured else _ROUGH_PRICE)
        self._own_variance = _OWN if is_measured else _ROUGH_OWN
        self._is_trusted = is_measured
        self._own: dict[int, tuple[float, float]] = {}  # deviation by rows: mean, variance
        self._expected_s = dict[float, float]()  # by rows, since the last pass
        # Actual over expected time: of the last pass, and of the last one of each width.
        self._last, self._last_of = 1.0, dict[int, float]()
        # Until the next pass: the width of a slow pass and the line before it. Widths with a fast
        # pass since a slow one was blamed on the machine.
        self._suspect: tuple[int, _Line] | None = None
        self._steady = set[int]()

    def at(self, rows: float) -> float:
        seconds = self._expected_s.get(rows)
        if seconds is None:  # looked up many times in a round
            seconds = self._expected_s[rows] = self._first_s * self._firsts(rows)
        return seconds

    def further(self, rows: int) -> list[float]:
        """Return what passes of 1, 2, ... `rows` rows take beyond one row."""
        plain_s = self.at(1)
        return [self.at(each) - plain_s for each in range(1, rows + 1)]

    def most_further_s(self, rows: int) -> float:
        """Return what a pass may take beyond one row: expected plus one standard deviation."""
        further = self._in_table(rows) - 1
        deviation = sqrt(further**2 * self._line.of_price + self._own_of(rows)[1])
        return self._first_s * (self._firsts(rows) - self._line.first + deviation)

    @property
    def measured(self) -> dict[int, float]:
        """Return the current seconds of passes at the table's widths."""
        return {rows: self.at(rows) for rows in self._rows}

    @property
    def slope(self) -> float:
        """Return the mean cost of one more row over the measured widths."""
        if len(self._rows) < 2:
            return 0.0
        wider = self._rows[-1] - self._rows[0]
        return max(0.0, self.at(self._rows[-1]) - self.at(self._rows[0])) / wider

    def padded(self, widths: Sequence[int]) -> RowCosts:
        """Return the costs of passes padded to the next of these ascending widths."""
        wider = {
            rows: self.at(next(width for width in widths if width >= rows))
            for rows in range(1, widths[-1] + 1)
        }
        found = RowCosts(wider, plain_rows=widths[0], is_measured=self.is_scaled)
        found._line.of_price, found._own_variance = self._line.of_price, self._own_variance
        return found

    def widest_free(self, more: float = 0.25) -> int:
        """Return the widest measured pass that takes at most 1 + `more` times one row's time."""
        return max(rows for rows in self._rows if self.at(rows) <= (1 + more) * self.at(1))

    def recall(self, seconds: Mapping[int, float]) -> None:
        """Start from earlier sessions' findings, which count for a few passes."""
        for _ in range(_RECALLED):
            for rows in sorted(seconds):
                self.observe(rows, seconds[rows])
                self._suspect = None  # these are medians
        self._last, self.is_unsure = 1.0, False
        self._last_of.clear()

    def observe(self, rows: int, seconds: float) -> float:
        """Count a pass; return its time over the longest plausible time for its rows."""
        if not self.is_scaled:
            self._first_s, self.is_scaled = max(seconds, _LEAST_S) / self._firsts(rows), True
        further = self._in_table(rows) - 1
        if further <= 0:
            if self._suspect is not None:
                self._clear_suspect(*self._suspect, seconds)
            self._line.fade()
        self._suspect = None
        (own, of_own), line = self._own_of(rows), self._line
        expected = max(_LEAST_PRICE, line.first * (1 + own) + line.price * further)
        ratio = min(max(seconds / (self._first_s * expected), 1 / _MOST_CHANGE), _MOST_CHANGE)
        believed = self._believed(rows, ratio)
        if believed * expected < line.first:  # one row takes no longer than several
            line.scale(believed * expected / line.first)
            self.is_unsure = True
            believed, expected = believed * expected / self._firsts(rows), self._firsts(rows)
        error = (believed - 1) * expected
        line.change(_PACE_CHANGES)
        line.of_price += _PRICE_CHANGES * line.price**2
        first = line.first
        noise = (_NOISE * expected) ** 2 + of_own * first**2
        of_all = line.variance(further) + noise
        most = expected + sqrt(of_all)
        self.is_unsure &= further > 0
        if ratio < _SLOW:
            self._steady.add(rows)
        if error**2 > _JUMP * of_all:
            if further > 0 and error > 0 and rows in self._steady:
                self._suspect = rows, replace(line)
            line.change((error / expected) ** 2)
            if further > 0:  # all rows or only the extra ones; a plain step will tell
                line.of_price += (error / further) ** 2
                self.is_unsure = True
            of_all = line.variance(further) + noise
        line.learn(error, further, of_all)
        if self._is_trusted and line.first < _OUTDATED:
            self._doubt_table()
        if of_own:
            gain = of_own * first**2 / of_all
            self._own[rows] = own + gain * error / first, of_own * (1 - gain)
        for each, (mean, variance) in self._own.items():
            self._own[each] = _FADING * mean, variance
        self._expected_s.clear()  # last: other threads may ask meanwhile
        return ratio * expected / most

    def _clear_suspect(self, rows: int, before: _Line, seconds: float) -> None:
        """Judge a slow wide pass by the plain step after it. before: the line before that pass.

        If that is fast, the extra rows became expensive or, far more often, another process
        interfered. The first time, assume the latter and undo the slow pass.
        """
        if seconds < _SLOW * self._first_s * before.first:
            self._line = before
            self._steady.remove(rows)

    def _doubt_table(self) -> None:
        """Assume cheap extra rows, to try some: the table must come from a busy machine."""
        self._is_trusted = False
        self._line.of_price, self._line.of_both = self._line.price**2, 0.0
        self._line.price *= _HOPED

    def _believed(self, rows: int, ratio: float) -> float:
        """Return actual over expected time, without disturbances. Slow passes need confirming: the
        first of a width allocates memory, others may wait for a process."""
        last, self._last = self._last, ratio
        last_of, self._last_of[rows] = self._last_of.get(rows, 1.0), ratio
        if ratio < _IMPOSSIBLE:
            return max(ratio, min(1.0, last))
        return min(ratio, max(1.0, last, last_of))

    def _firsts(self, rows: float) -> float:
        own = self._own[int(rows)][0] if rows in self._own else 0.0
        further = self._line.price * (self._in_table(rows) - 1)
        return max(_LEAST_PRICE, self._line.first * (1 + own) + further)

    def _own_of(self, rows: int) -> tuple[float, float]:
        """Return a width's deviation from the line, over the first row, and its variance."""
        return self._own.get(rows, (0.0, self._own_variance * (rows > self.plain_rows)))

    def _in_table(self, rows: float) -> float:
        is_known = isinstance(rows, int) and 0 < rows <= _TABLE_ROWS
        return self._table[int(rows)] if is_known else self._measured(rows) / self._table_first

    def _measured(self, rows: float) -> float:
        if len(self._rows) == 1:
            return self._seconds[0]
        right = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        low, high = self._rows[right - 1], self._rows[right]
        share = (rows - low) / (high - low)
        more_s = self._seconds[right] - self._seconds[right - 1]
        if share > 1:
            return self._seconds[right] + max(0.0, more_s) * (share - 1)
        return self._seconds[right - 1] + more_s * share


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Return the expected tokens of a round, the target's own included.

    acceptance: by position, given that the one before was accepted. Generalizes Leviathan et al.
    2023, equation 1, to unequal rates.
    """
    accepted: float = sum(accumulate(acceptance, mul))
    return 1 + accepted


def forecast_speedup(acceptance: Sequence[float], costs: RowCosts, draft_s: float) -> float:
    """Return a chain's speedup over plain decoding. draft_s: seconds for all its draft tokens."""
    round_s = draft_s + costs.at(len(acceptance) + 1)
    return expected_tokens(acceptance) * costs.at(1) / round_s


# Weight of earlier rounds: about the last 12 count. With 50, a model drafts too many tokens at
# first (benchmarks/results/sibling.json).
_RATE_MEMORY = 0.92
_MEMORY = 0.95  # for all else: about the last 20 count


class RoundCosts:
    """Round costs in plain steps at the current pace.

    A pass may take longer after one of another width: rebuilding a cached graph takes a fifth of a
    step of a small model. So a width is kept while that costs less than the rows it would save.

    plain_s: seconds of a plain round. token: steps per token, recently or in plain decoding if
    better. row: steps of one more row.
    """

    def __init__(self, costs: RowCosts) -> None:
        self.costs = costs
        self._around_s = 0.0  # seconds of a round outside drafting and the pass
        self._change_s = 0.0  # extra seconds of a pass after one of another width
        self._returns = 1.0  # share of wider passes that a plain step follows
        self._last_rows = costs.plain_rows  # of the last pass; 0 if it was shared
        self._steps = self._tokens = 1.0  # means over rounds
        self._look()

    def of(self, rows: int) -> float:
        """Return the steps of a round whose pass has this many rows."""
        return 1 + (self.costs.at(rows) - self.costs.at(1) + self._switch_s(rows)) / self.plain_s

    def further(self, rows: int) -> list[float]:
        """Return the seconds of passes of 1, 2, ... `rows` rows beyond a plain step. The last
        pass's width saves the cost of a change."""
        found = self.costs.further(rows)
        if (change_s := max(0.0, self._change_s)) and 0 < self._last_rows <= rows:
            found[self._last_rows - 1] -= change_s
        return found

    def most_lost(self, rows: int) -> float:
        """Return the steps that a pass may take beyond a plain one."""
        if rows <= self.costs.plain_rows:
            return 0.0
        return (self.costs.most_further_s(rows) + self._switch_s(rows)) / self.plain_s

    def rows_within(self, steps: float, most: int) -> int:
        """Return the most rows, 1 to `most`, that take at most `steps` beyond a plain pass."""
        return next((r for r in range(most, 1, -1) if self.most_lost(r) <= steps), 1)

    def best_gain(self, acceptance: Sequence[float], draft_token: float) -> float:
        """Return the plain steps saved by a round with the best number of draft tokens. acceptance:
        by position, given that those before it are right. draft_token: steps of one."""
        best, reach, tokens = -1.0, 1.0, 1.0
        for depth, chance in enumerate(acceptance, start=1):
            reach *= chance
            tokens += reach
            best = max(best, tokens - self.of(depth + 1) - depth * draft_token)
        return best

    def observe(self, round_stats: RoundStats, asked_s: float) -> float:
        """Count a round; return the seconds of a plain step under its load. asked_s: seconds spent
        asking drafters."""
        rows, seconds, before_s = round_stats.num_rows, round_stats.forward_s, self.costs.at(1)
        is_plain, is_scaled = rows <= self.costs.plain_rows, self.costs.is_scaled
        if self._last_rows > self.costs.plain_rows:
            self._returns = faded(self._returns, float(is_plain))
            if is_plain and is_scaled:
                self._change_s = faded(self._change_s, min(seconds - before_s, before_s))
        if self._last_rows not in (0, rows) and is_scaled:
            seconds = max(seconds - max(0.0, self._change_s), 0.5 * seconds)
        slowed = self.costs.observe(rows, seconds)
        before_s = before_s if is_scaled else self.costs.at(1)
        around_s = round_stats.total_s - round_stats.forward_s - round_stats.draft_s
        self._around_s = faded(self._around_s, without_outlier(around_s, self.costs.at(rows)))
        self._last_rows = rows if round_stats.num_sharing == 1 else 0
        self._look()
        # The machine may have been slower still while drafters ran.
        now_s = max(self.plain_s, max(1.0, min(slowed, OUTLIER)) * before_s)
        self._steps = faded(self._steps, self.of(rows) + asked_s / now_s, _RATE_MEMORY)
        self._tokens = faded(self._tokens, round_stats.num_tokens, _RATE_MEMORY)
        self.token = min(self._steps / self._tokens, 1.0)
        return now_s

    def follow(self, round_stats: RoundStats) -> None:
        """Count the pass of a plain round; `rest` counts the round itself."""
        if isfinite(round_stats.forward_s):
            self.costs.observe(round_stats.num_rows, round_stats.forward_s)

    def rest(self, rounds: int) -> None:
        """Count plain rounds without drafters."""
        left = _RATE_MEMORY**rounds
        self._steps, self._tokens = 1 + left * (self._steps - 1), 1 + left * (self._tokens - 1)
        self._last_rows = self.costs.plain_rows
        self._look()

    def _look(self) -> None:
        """Cache what is read many times in a round."""
        self.plain_s = self.costs.at(1) + self._around_s
        self.token = min(self._steps / self._tokens, 1.0)
        self.row = self.costs.slope / self.plain_s

    def _switch_s(self, rows: int) -> float:
        """Return the cost of changing to this width, and of changing back if that is usual."""
        if rows <= self.costs.plain_rows:
            return 0.0
        changes = self._last_rows not in (0, rows)
        return (self._returns + changes) * max(0.0, self._change_s)


def faded(mean: float, value: float, memory: float = _MEMORY) -> float:
    """Return an exponential mean with one more value. memory: weight of the earlier ones."""
    return memory * mean + (1 - memory) * value
