"""Figures of servers that answered the same prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from serve_kinds import figures  # noqa: E402

PROMPTS = [{"id": "a", "category": "code"}, {"id": "b", "category": "edit"}]


def entry(arm: str, id: str, text: str, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    counted = {"rounds": 0, "right": [0] * 4, "draft_n": 0, "draft_n_accepted": 0, **more}
    answer = {"text": text, "tokens": tokens, "seconds": seconds, "first_s": 0.1}
    return {"arm": arm, "id": id, "repeat": 0, **answer, **counted}


def test_rates_are_held_against_the_base_by_category_and_equal_texts_count_the_same() -> None:
    found = figures(
        [
            entry("other", "a", "x", 101, 4.0),  # counts the end of the text as a token
            entry("other", "b", "y", 51, 2.0),
            entry("ours", "a", "x", 100, 2.0, rounds=20, right=[15, 10, 5, 0], draft_n=60),
            entry("ours", "b", "z", 101, 1.0),
        ],
        PROMPTS,
        "other",
    )
    ours = found["arms"]["ours"]
    assert ours["rates"]["code"]["ratio"][0] == pytest.approx(2.0)
    assert ours["rates"]["edit"]["ratio"][0] == pytest.approx(4.0)
    assert ours["all"]["per_second"] == pytest.approx(200 / 3)
    assert ours["worst"] == {"prompt": "a", "ratio": pytest.approx(2.0)}
    assert ours["equal_to"] == {"other": 1}
    assert ours["right"] == [0.75, 0.5, 0.25, 0.0]


def test_a_second_pass_that_was_cut_does_not_count() -> None:
    entries = [entry(arm, id, "x", 80, 1.0) for arm in ("other", "ours") for id in ("a", "b")]
    again = [{**each, "repeat": 1, "seconds": 9.0} for each in entries if each["id"] == "a"]
    found = figures([*entries, *again], PROMPTS, "other")
    assert found["arms"]["ours"]["all"]["per_second"] == pytest.approx(79.0)


def test_answers_of_a_few_tokens_are_no_worst_prompt() -> None:
    entries = [
        entry("other", "a", "x", 60, 1.0),
        entry("ours", "a", "x", 60, 2.0),
        entry("other", "b", "x", 70, 1.0),
        entry("ours", "b", "x", 70, 1.5),
    ]
    ours = figures(entries, PROMPTS, "other")["arms"]["ours"]
    assert ours["worst"] == {"prompt": "b", "ratio": pytest.approx(2 / 3)}
    assert ours["below_0.97"] == ["b"]
