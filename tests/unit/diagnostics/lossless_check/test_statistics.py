"""The two tests of `edge-spec verify`, held against scipy and against simulated draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from edge_spec.diagnostics.lossless_check.statistics import (
    FALSE_ALARM,
    LEAST_P_VALUE,
    MIN_EXPECTED,
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


def test_enough_cells_are_left_and_each_expects_enough_draws() -> None:
    found = fit(drawn(WEIGHTS, 300), PROBABILITIES)
    kept, left = 0, 0.0
    for expected in sorted(WEIGHTS * 300, reverse=True):
        kept += expected >= MIN_EXPECTED
        left += expected if expected < MIN_EXPECTED else 0
    assert kept - 1 <= found.degrees_of_freedom <= kept - 1 + left / MIN_EXPECTED


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


@pytest.mark.parametrize("num_draws", [200, 1500, 100_000])
def test_two_cells_fail_as_rarely_as_promised(num_draws: int) -> None:
    """Exactly, from the binomial distribution: few expected draws in one cell are the worst."""
    limit = stats.chi2.isf(LEAST_P_VALUE, 1)
    for expected in np.geomspace(MIN_EXPECTED, num_draws / 2, 40):
        away = np.sqrt(limit * expected * (1 - expected / num_draws))
        right = stats.binom(num_draws, expected / num_draws)
        rate = right.cdf(np.ceil(expected - away) - 1) + right.sf(np.floor(expected + away))
        assert rate < FALSE_ALARM / 2


@pytest.mark.parametrize("num_cells", [2, 5, 26])
def test_many_small_cells_fail_as_rarely_as_promised(num_cells: int) -> None:
    """Exactly, but for counts that are independent (Poisson) rather than of one total."""
    counts = np.arange(5 * int(MIN_EXPECTED))
    chances = stats.poisson(MIN_EXPECTED).pmf(counts)
    squares = ((counts - MIN_EXPECTED) ** 2).astype(int)
    limit = int(stats.chi2.isf(LEAST_P_VALUE, num_cells) * MIN_EXPECTED)
    sums = np.zeros(limit + 1)  # how likely each sum of squares is, up to the limit
    sums[0] = 1
    for _ in range(num_cells):
        more = np.zeros_like(sums)
        for chance, square in zip(chances, squares, strict=True):
            if square <= limit:
                more[square:] += chance * sums[: limit + 1 - square]
        sums = more
    assert 1 - sums.sum() < FALSE_ALARM / 2


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
    """Texts that expect ten draws each stand in pairs there, of which one has taken all."""
    probabilities = {(i,): 1 / 200 for i in range(200)}
    found = fit({(i,): 20 for i in range(0, 200, 2)}, probabilities)
    assert found.total_variation == pytest.approx(0.5)
    assert found.p_value == 1 and not found.num_impossible
    assert found.total_variation > found.total_variation_bound and not found.passed


def test_other_probabilities_pass_within_what_is_allowed_and_no_further() -> None:
    """Each up to 10 % larger or smaller; one of them is twice as large in the end."""
    change = np.log(1.1)
    factors = np.where(np.arange(27) % 2, 1.1, 1 / 1.1)
    near = WEIGHTS * factors / (WEIGHTS * factors).sum()
    distance = float(np.abs(near - WEIGHTS).sum() / 2)
    for seed in range(20):
        found = fit(drawn(near, 20_000, seed), PROBABILITIES)
        assert not found.passed and found.passed_within(2 * change, distance)
        assert not found.passed_within(0.0, distance)  # chi-squared counts, too
        assert not found.passed_within(2 * change, distance / 10)
    far = near.copy()
    far[0] *= 2
    distance = float(np.abs(far / far.sum() - WEIGHTS).sum() / 2)
    found = fit(drawn(far / far.sum(), 20_000), PROBABILITIES)
    assert found.total_variation <= found.total_variation_bound + distance
    assert not found.passed_within(2 * change, distance)
    impossible = fit({**drawn(near, 20_000), (99,): 1}, PROBABILITIES)
    assert not impossible.passed_within(2 * change, distance)


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
