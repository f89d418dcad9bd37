"""The race that chooses a token: it draws from the probabilities, and so that similar models agree.

Every test has fixed seeds. Its bound is passed with a chance of 1e-6 for a fresh choice of them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from edge_spec.core.rng import Draws, Purpose, exponential
from edge_spec.core.sampling import Sampler, SamplingParams, target_probs
from edge_spec.drafters.lookup.recycling import top_tokens
from fixtures.axes import each_first

SMALLEST_P = 1e-6
DEVIATIONS = 4.9  # a normal number is further from its mean with a chance of 1e-6
ANY = SamplingParams(temperature=1.0, seed=0)


def chosen(logits: np.ndarray, draws: int, seed: int = 0, **options: Any) -> np.ndarray:
    """[draws] int: what a sampler takes with the same logits at each position."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": seed, **options}), [])
    tokens = []
    for sampler.num_chosen in range(draws):
        tokens.append(sampler.choose(logits, []).token)
    return np.array(tokens)


def p_value(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the chi-squared test; tokens with fewer than 5 expected draws share a cell."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    common = expected >= 5
    observed, masses = counts[common], expected[common]
    if expected[~common].sum() > 0:
        observed = np.append(observed, counts[~common].sum())
        masses = np.append(masses, expected[~common].sum())
    return float(chisquare(observed, masses).pvalue)


@pytest.mark.parametrize(
    ("vocab", "options"),
    each_first([3, 8, 100], [{}, {"top_k": 5}, {"temperature": 1.5, "top_p": 0.9}]),
)
def test_the_race_draws_from_the_probabilities(vocab: int, options: dict[str, Any]) -> None:
    logits = np.random.default_rng(vocab).normal(0, 1, vocab).astype(np.float32)
    probabilities = target_probs(logits, SamplingParams(**{"temperature": 1.0, **options}))
    tokens = chosen(logits, 20_000, **options)
    assert (probabilities[tokens] > 0).all()
    # 1 % of the mass from one token of a half to another adds 20,000 * 0.01^2 / 0.5 * 2 = 8 to the
    # statistic of one degree of freedom: 2 % are found (p 1e-8).
    assert p_value(tokens, probabilities) > SMALLEST_P


def test_the_race_draws_from_a_peaked_distribution_over_many_tokens() -> None:
    """A wide vocabulary hides what goes wrong in a narrow one, and the other way round."""
    vocab = 50_000
    logits = np.zeros(vocab, np.float32)
    logits[[7, 30_000, 49_999]] = np.log([2 * vocab, vocab, vocab / 2])
    tokens = chosen(logits, 4_000)
    assert p_value(tokens, target_probs(logits, ANY)) > SMALLEST_P
    rest = tokens[~np.isin(tokens, [7, 30_000, 49_999])]  # uniform: about 900 of them
    assert kstest(rest / vocab, "uniform").pvalue > SMALLEST_P
    assert len(set(rest.tolist())) > 0.95 * len(rest)


def exponentials(keys: np.ndarray, tokens: int) -> np.ndarray:
    """[keys, tokens] float64."""
    return np.stack([exponential(int(key), np.arange(tokens)) for key in keys])


def test_the_numbers_are_exponential() -> None:
    numbers = exponentials(np.array([Draws(3).at(i) for i in range(50)]), 2_000)
    assert kstest(numbers.ravel(), "expon").pvalue > SMALLEST_P
    assert numbers.min() > 0


@pytest.mark.parametrize(
    "neighbours",
    [
        lambda: exponentials(np.array([Draws(3).at(i) for i in range(2_001)]), 50),
        lambda: exponentials(np.array([Draws(seed).at(0) for seed in range(2_001)]), 50),
        lambda: exponentials(np.arange(2_001), 50),  # keys that differ in a bit or two
        lambda: exponentials(np.arange(2_001, dtype=np.uint64) << np.uint64(53), 50),
        lambda: exponentials(np.array([Draws(5).at(i) for i in range(50)]), 2_001).T,
    ],
    ids=["positions", "seeds", "keys", "high keys", "tokens"],
)
def test_neighbouring_numbers_are_independent(neighbours: Any) -> None:
    """Uncorrelated: of n pairs the correlation is normal with a deviation of 1 / sqrt(n)."""
    numbers = neighbours()
    small = (numbers < math.log(2)).astype(float)
    for transformed in (numbers, np.log(numbers), small):
        for distance in (1, 2):
            pairs = transformed[:-distance].ravel(), transformed[distance:].ravel()
            bound = DEVIATIONS / math.sqrt(pairs[0].size)
            assert abs(np.corrcoef(*pairs)[0, 1]) < bound


def test_streams_are_independent_of_each_other() -> None:
    sampler = Sampler(ANY, [])
    streams = np.array([[sampler.uniform(purpose) for purpose in Purpose] for _ in range(20_000)])
    positions = [sampler._draws.at(i) / 2**64 for i in range(20_000)]
    correlation = np.corrcoef(np.column_stack([streams, positions]).T) - np.eye(len(Purpose) + 1)
    # A stream by number and the positions' own are the same one twice.
    correlation[Purpose.POSITION, -1] = correlation[-1, Purpose.POSITION] = 0
    assert np.abs(correlation).max() < DEVIATIONS / math.sqrt(20_000)


@given(
    seed=st.integers(0, 1000),
    options=st.sampled_from(
        [
            {"temperature": 0.0},
            {"temperature": 0.0, "repetition_penalty": 1.5},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.8},
            {"temperature": 2.0, "top_k": 3, "presence_penalty": 0.5},
            {"temperature": 1.0, "frequency_penalty": 0.7},
        ]
    ),
    path=st.lists(st.integers(0, 9), max_size=4),
    count=st.integers(1, 12),
)
def test_the_order_of_preference_is_the_order_of_choice(
    seed: int, options: dict[str, Any], path: list[int], count: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 10).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=seed, **options), [1, 2])
    sampler.observe([3, 4, 3])
    likeliest = ranked(sampler, logits, path, count)
    assert likeliest[0] == sampler.choose(logits, path).token
    assert len(set(likeliest)) == len(likeliest) <= count
    assert likeliest == ranked(sampler, logits, path, 12)[:count]
    if not sampler.params.greedy:
        possible = sampler.probs(logits, path) > 0
        assert possible[likeliest].all() and len(likeliest) == min(count, possible.sum())
    if sampler.params.top_k or sampler.params.top_p < 1:
        return  # others would come in where one is missing
    # Without the first, the second is chosen.
    without = logits.copy()
    for first, second in pairwise(likeliest):
        without[first] = -np.inf
        assert sampler.choose(without, path).token == second


def ranked(sampler: Sampler, logits: np.ndarray, path: list[int], count: int) -> list[int]:
    preference = sampler.preference(logits, path)
    count = min(count, np.count_nonzero(preference))
    ranked: list[int] = top_tokens(preference[None], count)[0].tolist()
    return ranked


def test_greedy_preference_is_in_the_order_of_the_logits() -> None:
    sampler = Sampler(SamplingParams(), [])
    logits = np.log(np.array([0.1, 0.4, 1e-9, 0.3, 0.2]))
    assert ranked(sampler, logits, [], 3) == [1, 3, 4]


@given(
    seed=st.integers(0, 1000),
    options=st.sampled_from(
        [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.4}]
    ),
)
def test_the_preferred_token_is_the_one_that_is_chosen(seed: int, options: dict[str, Any]) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 10).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=seed, **options), [1, 2])
    preference = sampler.preference(logits, [5])
    assert preference.argmax() == sampler.choose(logits, [5]).token
    assert (preference >= 0).all() and np.isfinite(preference).all()
    possible = sampler.probs(logits, [5]) > 0
    assert ((preference > 0) >= possible).all()


@pytest.mark.parametrize("difference", [pytest.param(0.05, marks=pytest.mark.slow), 0.3, 1.0, 4.0])
def test_similar_models_choose_the_same_token_as_often_as_theory_says(difference: float) -> None:
    """Of one race (Daliri et al. 2024, theorem 4): x wins for both with the chance
    1 / sum_y max(p_y / p_x, q_y / q_x), in all at least (1 - TV) / (1 + TV)."""
    vocab, draws = 20, 20_000
    random = np.random.default_rng(7)
    one = random.normal(0, 1.5, vocab).astype(np.float32)
    other = one + random.normal(0, difference, vocab).astype(np.float32)
    p, q = target_probs(one, ANY), target_probs(other, ANY)
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
    same = float((1 / ratios.sum(1)).sum())
    distance = np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= same <= 1 - distance
    found = (chosen(one, draws, seed=4) == chosen(other, draws, seed=4)).mean()
    assert abs(found - same) < DEVIATIONS * math.sqrt(same * (1 - same) / draws)
    # Another seed has another race: there they agree only by chance.
    by_chance = float((p * q).sum())
    found = (chosen(one, draws, seed=4) == chosen(other, draws, seed=5)).mean()
    assert abs(found - by_chance) < DEVIATIONS * math.sqrt(by_chance * (1 - by_chance) / draws)


def test_a_smaller_vocabulary_takes_part_in_the_same_race() -> None:
    tokens = np.arange(100)
    assert (exponential(9, tokens)[:40] == exponential(9, tokens[:40])).all()
    assert (exponential(9, tokens)[[3, 70]] == exponential(9, np.array([3, 70]))).all()


@pytest.mark.parametrize("temperature", [1e-310, 1e-3, 0.05, 1.0, 1e3])
def test_extreme_logits_and_temperatures_are_drawn_without_a_warning(temperature: float) -> None:
    """Probabilities down to the smallest float64; warnings are errors."""
    logits = np.concatenate([np.linspace(-800, 80, 2_000), [-math.inf] * 3]).astype(np.float32)
    truncations: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}]
    for options in truncations:
        params = SamplingParams(**{"temperature": temperature, "seed": 1, **options})
        probabilities = target_probs(logits, params)
        assert probabilities.sum() == pytest.approx(1)
        sampler = Sampler(params, [])
        for sampler.num_chosen in range(20):
            token = sampler.choose(logits, []).token
            assert probabilities[token] > 0
            assert sampler.preference(logits, []).argmax() == token
