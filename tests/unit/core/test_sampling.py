"""Sampling: processing and draws against straightforward computations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.rng import Draws, pick
from edge_spec.core.sampling import Sampler, SamplingParams, target_probs
from edge_spec.errors import UsageError

LOGITS = np.array([1.0, -2.0, 3.0, 0.5, 2.0, -0.5], np.float32)


def reference_probs(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p and min-p, one token at a time. Logits must be distinct."""
    weights = [math.exp(float(logit) / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: params.top_k] if params.top_k else order
    total = sum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if params.top_p < 1 and mass >= params.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    kept = [token for token in nucleus if weights[token] >= params.min_p * weights[nucleus[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


@given(
    seed=st.integers(0, 1000),
    vocab_size=st.integers(2, 40),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
)
def test_probabilities_equal_the_straightforward_computation(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, vocab_size).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = target_probs(logits, params)
    # float64 on both sides: only the order of summation differs.
    assert got == pytest.approx(reference_probs(logits.tolist(), params), abs=1e-12)
    assert got.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1, top_k=2), {0, 1, 2}),
        (SamplingParams(temperature=1, top_p=0.3), {0, 1, 2}),
        (SamplingParams(temperature=1, top_p=0.8), {0, 1, 2}),
    ],
)
def test_ties_with_the_last_token_kept_are_kept(params: SamplingParams, kept: set[int]) -> None:
    probabilities = target_probs(np.array([2, 2, 2, 0], np.float32), params)
    assert set(np.flatnonzero(probabilities)) == kept
    assert len({probabilities[token] for token in kept}) == 1


def test_top_p_close_to_1_drops_nothing_and_does_not_fail() -> None:
    # The cumulative sum of many equal probabilities may end a little below 1.
    for vocab_size in (10, 49_152, 128_256, 151_936):
        params = SamplingParams(temperature=1, top_p=math.nextafter(1, 0))
        assert (target_probs(np.zeros(vocab_size, np.float32), params) > 0).all()


def test_a_token_without_probability_is_never_chosen() -> None:
    params = SamplingParams(temperature=1.5, top_k=2, logit_bias={2: -math.inf})
    chosen = {
        Sampler(SamplingParams(**{**vars(params), "seed": seed}), []).choose(LOGITS, []).token
        for seed in range(300)
    }
    assert chosen == {4, 0}


@pytest.mark.parametrize(
    ("draw", "token"),
    [(0.0, 1), (0.24, 1), (0.25, 3), (0.74, 3), (0.75, 4), (1 - 2**-53, 4)],
)
def test_a_draw_picks_the_token_whose_share_it_falls_into(draw: float, token: int) -> None:
    assert pick(np.array([0, 0.25, 0, 0.5, 0.25, 0]), draw) == token


def test_a_draw_from_many_float32_weights_is_as_exact_as_from_float64() -> None:
    # Summed up in float32, equal weights would be off by up to 18 tokens here.
    weights = np.full(50_000, 1e-5, np.float32)
    for draw in (0.1, 0.5, 0.99999):
        assert abs(pick(weights, draw) - draw * len(weights)) <= 1


def test_penalties_and_bias_equal_the_straightforward_computation() -> None:
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={1: 4.0, 2: -1.0},
    )
    sampler = Sampler(params, prompt=[0, 1])
    sampler.observe([3, 4, 3])
    path = [5, 4]
    expected = LOGITS.astype(float).tolist()
    expected[1] += 4.0
    expected[2] -= 1.0
    for token in {0, 1, 3, 4, 5}:  # prompt, output, path: once each, however often they came
        logit = expected[token]
        expected[token] = logit / 1.5 if logit > 0 else logit * 1.5
    for token in {3, 4, 5}:  # output and path
        expected[token] -= 0.25 + 0.5 * [3, 4, 3, *path].count(token)
    before = LOGITS.copy()
    # float32 arithmetic on values of about 3: six digits.
    assert sampler._processed(LOGITS, path).tolist() == pytest.approx(expected, abs=1e-6)
    assert (before == LOGITS).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=1.5),
    ],
)
def test_penalties_count_the_rows_own_path(params: SamplingParams) -> None:
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    sampler = Sampler(params, [])
    assert sampler.choose(logits, []).token == 0
    assert sampler.choose(logits, [0]).token == 1
    assert sampler.choose(logits, [1]).token == 0
    assert sampler.choose(logits, []).token == 0  # a path leaves no trace
    sampler.observe([0])
    assert sampler.choose(logits, []).token == 1


@pytest.mark.parametrize(
    "given",
    [
        *({"top_k": value} for value in (1.5, True, "5", -1, None)),
        *({"seed": value} for value in (1.5, True, "5", -1)),
        *({"temperature": value} for value in (True, "1", None, float("nan"))),
        *({"frequency_penalty": value} for value in (True, "1", float("inf"))),
        *({"logit_bias": value} for value in ({"1": 2}, {1.5: 2}, {1: "x"}, {1: True}, [(1, 2)])),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(given))} is"):
        SamplingParams(**given)


def test_a_path_and_the_same_output_give_the_same_choice() -> None:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
    params = SamplingParams(temperature=1, seed=3, **penalties)
    for seed in range(50):
        path = np.random.default_rng(seed).integers(0, 6, 4).tolist()
        told = Sampler(params, [1])
        told.observe(path)
        assert told.choose(LOGITS, []) == Sampler(params, [1]).choose(LOGITS, path)


@given(positions=st.lists(st.integers(0, 900), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_draws_do_not_depend_on_the_order_of_asking(positions: list[int], seed: int) -> None:
    ascending = Draws(seed)
    in_order = [ascending.at(position) for position in range(901)]
    draws = Draws(seed)
    assert [draws.at(position) for position in positions] == [in_order[p] for p in positions]
    assert all(0 <= draw < 2**64 for draw in in_order)


@pytest.mark.parametrize("seed", [0, 2**53, 2**63, 2**64 - 3])
def test_draws_differ_between_neighbouring_seeds_and_purposes(seed: int) -> None:
    assert len({Draws(seed).at(0), Draws(seed + 1).at(0), Draws(seed, 1).at(0)}) == 3


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_any_64_bit_seed_works(seed: int) -> None:
    sampler = Sampler(SamplingParams(temperature=1, seed=seed), [])
    assert sampler.seed == seed
    assert 0 <= sampler.choose(LOGITS, []).token < 6


def test_without_a_seed_each_sampler_has_its_own() -> None:
    assert Sampler(SamplingParams(), []).seed != Sampler(SamplingParams(), []).seed


@pytest.mark.parametrize(
    ("margin", "logits", "near"),
    [
        (0.0, [1.0, 2.0, 1.5], False),
        (0.0, [2.0, 2.0, 1.5], False),  # where no choice can change, none is counted
        (0.1, [2.0, 2.0, 1.5], True),
        (0.4, [1.0, 2.0, 1.5], False),
        (0.5, [1.0, 2.0, 1.5], True),
    ],
)
def test_a_greedy_choice_within_the_margin_is_a_near_tie(
    margin: float, logits: list[float], near: bool
) -> None:
    choice = Sampler(SamplingParams(), [], margin).choose(np.array(logits, np.float32), [])
    assert choice.near_tie is near
    assert choice.token == logits.index(2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.nan},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_a_parameter_out_of_range_is_a_usage_error_that_names_it(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        SamplingParams(**wrong)
