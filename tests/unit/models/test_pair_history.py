"""What is known of how often a pair's draft tokens were accepted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edge_spec.core.metrics import DraftRounds
from edge_spec.models.pair_history import MAX_ROUNDS, add_rounds, counted_rounds, first_acceptance

KEY = ("target", "abc", "draft", "xyz")
DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))


def answer(right: int, wrong: int) -> DraftRounds:
    return DraftRounds(right + wrong, right)


def test_enough_rounds_are_known_in_the_next_process() -> None:
    add_rounds(KEY, answer(30, 30))
    assert first_acceptance(KEY) is None  # too few
    add_rounds(KEY, answer(30, 30))
    assert first_acceptance(KEY) == 0.5
    assert counted_rounds(KEY) == (120, 60)
    assert first_acceptance((*KEY[:3], "another")) is None


@pytest.mark.parametrize(
    ("later_s", "acceptance"), [(60.0, 0.5), (2 * DAY_S, None), (365 * DAY_S, None), (-60.0, None)]
)
def test_a_day_later_and_where_the_clock_was_set_back_it_says_nothing(
    later_s: float, acceptance: float | None
) -> None:
    add_rounds(KEY, answer(100, 100))
    add_rounds(KEY, answer(0, 0))  # of a session without the draft
    assert first_acceptance(KEY, lambda: time.time() + later_s) == acceptance


def test_older_rounds_count_less() -> None:
    for _ in range(20):
        add_rounds(KEY, answer(0, 200))
    assert counted_rounds(KEY) == (MAX_ROUNDS, 0)
    add_rounds(KEY, answer(800, 0))
    assert counted_rounds(KEY) == (MAX_ROUNDS, 400)
