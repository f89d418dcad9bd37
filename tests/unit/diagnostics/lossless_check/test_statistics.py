"""The two tests of `edge-spec verify`, held against scipy and against simulated draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from edge_spec.diagnostics.lossless_check.sampling import FALSE_ALARM, fit

# Skewed, as texts are: the likeliest of 27 has 200 times the least one's probability.
WEIGHTS = np.kron(np.kron([0.6, 0.3, 0.1], [0.5, 0.4, 0.1]), [0.55, 0.35, 0.1])
PROBABILITIES = {(i,): float(p) for i, p in enumerate(WEIGHTS)}


def drawn(weights: np.ndarray, num_draws: int, seed: int = 0) -> dict[tuple[int, ...], int]:
    counts = np.random.default_rng(seed).multinomial(num_draws, weights)
    return {(i,): int(count) for i, count in enumerate(counts) if count}


def test_the_statistics_are_those_of_scipy() -> None:
    counts = drawn(WEIGHTS, 300)
    found = fit(counts, PROBABILITIES)
    shares = np.array([counts.get((i,), 0) / 300 for i in range(27)])
    assert found.divergence == pytest.approx(300 * stats.entropy(shares, WEIGHTS))
    assert found.total_variation == pytest.approx(np.abs(shares - WEIGHTS).sum() / 2)
    mean = np.sqrt(WEIGHTS * (1 - WEIGHTS) / 300).sum() / 2
    slack = np.sqrt(np.log(2 / FALSE_ALARM) / (2 * 300))
    assert found.total_variation_bound == pytest.approx(mean + slack)


@pytest.mark.parametrize("num_draws", [20, 500])
def test_right_draws_pass_and_their_p_values_are_no_smaller_than_they_may(num_draws: int) -> None:
    found = [fit(drawn(WEIGHTS, num_draws, seed), PROBABILITIES) for seed in range(2000)]
    assert all(each.passed for each in found)
    p_values = np.array([each.p_value for each in found])
    for level in (0.5, 0.1, 0.01):
        assert (p_values < level).mean() <= level
    assert max(each.total_variation for each in found) < found[0].total_variation_bound


def shifted(moved: float) -> np.ndarray:
    """Evenly is how it is hardest to see: half of the probability becomes less likely."""
    order = np.random.default_rng(0).permutation(27)
    less = order[WEIGHTS[order].cumsum() <= 0.5]
    factors = np.full(27, 1 + moved / (1 - WEIGHTS[less].sum()))
    factors[less] = 1 - moved / WEIGHTS[less].sum()
    made: np.ndarray = WEIGHTS * factors
    assert np.abs(made - WEIGHTS).sum() / 2 == pytest.approx(moved)
    return made


def test_a_shift_of_20_percent_fails_however_it_is_spread() -> None:
    """Of texts after two prompts, half of the draws after each, as `verify` draws them."""
    halves = np.concatenate([WEIGHTS, WEIGHTS]) / 2
    made = np.concatenate([shifted(0.2), shifted(0.2)]) / 2
    cells = {(i,): float(p) for i, p in enumerate(halves)}
    assert not any(fit(drawn(made, 1500, seed), cells).passed for seed in range(50))
