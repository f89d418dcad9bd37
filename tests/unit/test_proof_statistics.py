"""The two tests of `edge-spec verify`, held against scipy and against simulated draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from edge_spec.proof.statistics import (
    FALSE_ALARM,
    chi_squared_tail,
    fit,
    total_variation_bound,
)

# Skewed, as texts are: the likeliest of 27 has 200 times the least one's probability.
WEIGHTS = np.kron(np.kron([0.6, 0.3, 0.1], [0.5, 0.4, 0.1]), [0.55, 0.35, 0.1])
PROBABILITIES = {(i,): float(p) for i, p in enumerate(WEIGHTS)}


@pytest.mark.parametrize("degrees", [1, 2, 3, 8, 25, 26, 63, 200])
def test_the_tail_is_that_of_the_chi_squared_distribution(degrees: int) -> None:
    for statistic in (0.0, 0.01, 1.0, degrees * 0.5, degrees, degrees * 2.0, degrees + 150.0):
        expected = stats.chi2.sf(statistic, degrees)
        assert chi_squared_tail(statistic, degrees) == pytest.approx(expected, rel=1e-9)


def test_one_cell_says_nothing() -> None:
    only = fit({(1,): 50}, {(1,): 1.0})
    assert (only.degrees_of_freedom, only.p_value, only.passed) == (0, 1.0, True)


def drawn(weights: np.ndarray, num_draws: int, seed: int = 0) -> dict[tuple[int, ...], int]:
    counts = np.random.default_rng(seed).multinomial(num_draws, weights)
    return {(i,): int(count) for i, count in enumerate(counts) if count}


def test_enough_cells_are_left_and_each_expects_five_draws() -> None:
    found = fit(drawn(WEIGHTS, 300), PROBABILITIES)
    kept, left = 0, 0.0
    for expected in sorted(WEIGHTS * 300, reverse=True):
        kept += expected >= 5
        left += expected if expected < 5 else 0
    assert kept - 1 <= found.degrees_of_freedom <= kept - 1 + left / 5


def test_right_draws_pass_and_their_p_values_are_even() -> None:
    found = [fit(drawn(WEIGHTS, 500, seed), PROBABILITIES) for seed in range(2000)]
    assert all(each.passed for each in found)
    p_values = np.array([each.p_value for each in found])
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    # The bound leaves room, so it is no test of anything below it.
    distances = np.array([each.total_variation for each in found])
    assert distances.max() < found[0].total_variation_bound
    # Half the mean absolute deviation is below half the standard deviation.
    slack = np.sqrt(np.log(2 / FALSE_ALARM) / (2 * 500))
    assert distances.mean() < found[0].total_variation_bound - slack


def test_the_heavier_tail_of_small_cells_is_allowed_for() -> None:
    expected = np.full(27, 5.0)
    counts = np.random.default_rng(1).multinomial(135, expected / 135, 400_000)
    statistics = ((counts - expected) ** 2 / expected).sum(axis=1)
    rate = np.mean(statistics > stats.chi2.isf(1e-4, 26))
    assert rate < 3e-4


def test_a_shift_of_15_percent_fails_however_it_is_spread() -> None:
    """Evenly is how it is hardest to see: half of the probability becomes 30 % less likely."""
    order = np.random.default_rng(0).permutation(27)
    less = order[WEIGHTS[order].cumsum() <= 0.5]
    factors = np.full(27, 1 + 0.15 / (1 - WEIGHTS[less].sum()))
    factors[less] = 1 - 0.15 / WEIGHTS[less].sum()
    shifted = WEIGHTS * factors
    assert np.abs(shifted - WEIGHTS).sum() / 2 == pytest.approx(0.15)
    assert not any(fit(drawn(shifted, 1500, seed), PROBABILITIES).passed for seed in range(20))


def test_total_variation_fails_alone_where_chi_squared_sees_nothing() -> None:
    """One cell of two texts is all that chi-squared has, if each expects too few draws."""
    probabilities = {(i,): 1 / 400 for i in range(400)}
    counts = {(i,): 5 for i in range(100)}  # 500 draws of a quarter of the texts
    found = fit(counts, probabilities)
    assert found.total_variation == pytest.approx(0.75)
    assert found.total_variation > found.total_variation_bound


def test_what_has_no_probability_must_not_be_drawn() -> None:
    counts = drawn(WEIGHTS, 2000)
    counts[99,] = 1
    found = fit(counts, PROBABILITIES)
    assert found.num_impossible == 1 and not found.passed
    assert found.p_value > 1e-3


def test_the_bound_of_total_variation_is_the_one_derived() -> None:
    even = {(i,): 1 / 4 for i in range(4)}
    mean = 4 * np.sqrt(0.25 * 0.75 / 1000) / 2
    assert total_variation_bound(even, 1000) == pytest.approx(
        mean + np.sqrt(np.log(2e6) / 2000), rel=1e-12
    )
