"""How a model's makers mean its answers to be drawn, what is asked instead, and what is no use."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from edge_spec.core.recommended_sampling import (
    DEFAULT_SAMPLING,
    NOTHING_STATED,
    recommended_sampling,
)
from edge_spec.core.sampling import SamplingParams
from edge_spec.errors import UsageError

LLAMA = recommended_sampling({"temperature": 0.6, "top_p": 0.9})


def test_where_nothing_is_stated_the_defaults_hold() -> None:
    assert NOTHING_STATED.with_asked({}) == DEFAULT_SAMPLING
    assert SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05) == DEFAULT_SAMPLING


def test_what_is_stated_holds_alone() -> None:
    """The defaults are not mixed into what somebody else chose."""
    assert LLAMA.with_asked({}) == SamplingParams(temperature=0.6, top_p=0.9)
    gemma = recommended_sampling({"top_k": 64, "top_p": 0.95})
    assert gemma.with_asked({}) == SamplingParams(temperature=1.0, top_k=64, top_p=0.95)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"temperature": 0.3}, SamplingParams(0.3, top_p=0.9)),
        ({"top_p": 1.0}, SamplingParams(0.6)),
        ({"top_k": 0, "seed": 7}, SamplingParams(0.6, top_p=0.9, seed=7)),
        ({"temperature": None, "min_p": 0.1}, SamplingParams(0.6, top_p=0.9, min_p=0.1)),
        ({"temperature": 0.0}, SamplingParams()),
    ],
)
def test_what_is_asked_wins_each_for_itself(asked: Any, expected: SamplingParams) -> None:
    assert LLAMA.with_asked(asked) == expected


def test_temperature_0_is_the_likeliest_token_whatever_else_is_stated() -> None:
    penalized = recommended_sampling({"temperature": 0.7, "repetition_penalty": 1.1})
    assert penalized.with_asked({"temperature": 0}).raw
    assert penalized.with_asked({"temperature": 0.7}).penalized


def test_what_is_asked_has_to_be_in_its_range() -> None:
    with pytest.raises(UsageError, match="temperature is -1"):
        LLAMA.with_asked({"temperature": -1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (nan, inf, -0.1, 2.5, "0.7", True, [0.7], 10**400)],
        *[("top_p", value) for value in (0, 2, -1, nan, {})],
        *[("top_k", value) for value in (-1, 1.5, 2**40, "40", nan)],
        *[("min_p", value) for value in (1, -0.1, "few")],
        *[("repetition_penalty", value) for value in (0, -1, inf, 100)],
    ],
)
def test_a_value_that_no_sampling_has_is_passed_over_and_told(name: str, value: Any) -> None:
    found = recommended_sampling({"temperature": 0.5, name: value})
    assert found.stated == ({} if name == "temperature" else {"temperature": 0.5})
    assert len(found.ignored) == 1 and len(found.ignored[0]) < 80 and "\n" not in found.ignored[0]
    found.with_asked({})  # nothing of it is refused
