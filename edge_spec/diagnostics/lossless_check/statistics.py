"""Tests whether draws come from a known distribution: chi-squared and total variation.

There are n draws; p is the probability of each text and f its share of the draws. Total variation
is half the sum of |f - p|. Its mean is at most half the sum of sqrt(p (1 - p) / n), because
E|f - p| is at most the standard deviation, and it exceeds its mean by e with a probability of at
most exp(-2 n e^2) (McDiarmid 1989). The bound is that mean plus sqrt(ln(1 / a) / (2 n)) with
a = 5e-7, for any n. Pearson's statistic is more sensitive, but its distribution is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import erfc, exp, expm1, lgamma, log, sqrt

FALSE_ALARM = 1e-6  # of both tests together, at most half of it each
# Counts have a heavier tail than the chi-squared distribution, the more so the fewer are expected.
# With these two, right draws fail 1.2e-7 of the time at most: two cells, computed exactly.
LEAST_P_VALUE = 1e-9
MIN_EXPECTED = 20.0  # draws of a cell

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """Holds how well counts fit probabilities. `total_variation_bound` is exceeded by right draws
    with a probability of at most FALSE_ALARM / 2."""

    num_draws: int
    chi_squared: float
    degrees_of_freedom: int
    p_value: float
    total_variation: float
    total_variation_bound: float
    num_impossible: int  # draws of what has no probability

    @property
    def passed(self) -> bool:
        return (
            self.p_value >= LEAST_P_VALUE
            and self.total_variation <= self.total_variation_bound
            and not self.num_impossible
        )

    def passed_within(self, change: float, distance: float) -> bool:
        """Says whether the draws may come from probabilities q that are each up to exp(change)
        times as large or as small as p, and all together at most `distance` away in total
        variation.

        The root of the statistic is a norm of counts - n p, so it is at most that of counts - n q
        and that of n (q - p) together. The square of the latter is n times the sum of
        (q - p)^2 / p, where |q - p| / p <= exp(change) - 1 and the |q - p| sum up to 2 distance.
        """
        most = expm1(change)
        room = sqrt(self.num_draws * most * min(most, 2 * distance))
        statistic = exp(-change) * max(0.0, sqrt(self.chi_squared) - room) ** 2
        return (
            chi_squared_tail(statistic, self.degrees_of_freedom) >= LEAST_P_VALUE
            and self.total_variation <= self.total_variation_bound + distance
            and not self.num_impossible
        )


def fit(counts: Mapping[Cell, int], probabilities: Mapping[Cell, float]) -> Fit:
    """Counts of at least one draw; probabilities that sum to 1."""
    num_draws = sum(counts.values())
    statistic, num_cells = _chi_squared(counts, probabilities, num_draws)
    degrees = num_cells - 1
    impossible = sum(count for cell, count in counts.items() if cell not in probabilities)
    distance = sum(
        abs(counts.get(cell, 0) / num_draws - probability)
        for cell, probability in probabilities.items()
    )
    return Fit(
        num_draws=num_draws,
        chi_squared=statistic,
        degrees_of_freedom=degrees,
        p_value=chi_squared_tail(statistic, degrees),
        total_variation=(distance + impossible / num_draws) / 2,
        total_variation_bound=total_variation_bound(probabilities, num_draws),
        num_impossible=impossible,
    )


def chi_squared_tail(statistic: float, degrees_of_freedom: int) -> float:
    """P(X >= statistic); 1 without a degree of freedom.

    Q(a + 1, y) = Q(a, y) + y^a e^-y / Gamma(a + 1), from Q(1, y) = e^-y or Q(1/2, y) =
    erfc(sqrt(y)) on (Abramowitz and Stegun 1964, 6.5.21): a sum of positive numbers.
    """
    y = statistic / 2
    if degrees_of_freedom == 0 or y <= 0:
        return 1.0
    order = 0.5 if degrees_of_freedom % 2 else 1.0
    tail = erfc(sqrt(y)) if degrees_of_freedom % 2 else exp(-y)
    while order < degrees_of_freedom / 2:
        tail += exp(order * log(y) - y - lgamma(order + 1))
        order += 1
    return min(tail, 1.0)


def total_variation_bound(probabilities: Mapping[Cell, float], num_draws: int) -> float:
    """Returns what right draws exceed with a probability of at most FALSE_ALARM / 2.

    The mean is at most half the sum of the cells' standard deviations (Jensen); one draw moves the
    distance by at most 1 / num_draws, so it exceeds its mean by e with a probability of at most
    exp(-2 num_draws e^2) (McDiarmid 1989).
    """
    deviations = sum(sqrt(p * max(0.0, 1 - p) / num_draws) for p in probabilities.values())
    return deviations / 2 + sqrt(log(2 / FALSE_ALARM) / (2 * num_draws))


def _chi_squared(
    counts: Mapping[Cell, int], probabilities: Mapping[Cell, float], num_draws: int
) -> tuple[float, int]:
    """The statistic and its number of cells: the least expected ones go together until each
    expects enough, chosen without a look at the counts."""
    cells = [(p * num_draws, i, counts.get(c, 0)) for i, (c, p) in enumerate(probabilities.items())]
    heapify(cells)
    while len(cells) > 1 and cells[0][0] < MIN_EXPECTED:
        expected, _, count = heappop(cells)
        other = cells[0]
        heapreplace(cells, (other[0] + expected, other[1], other[2] + count))
    statistic = sum((count - expected) ** 2 / expected for expected, _, count in cells)
    return statistic, len(cells)
