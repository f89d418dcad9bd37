"""What is known of how often a pair's draft tokens were accepted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edge_spec.core.metrics import DraftRounds
from edge_spec.models.pair_history import PairHistory

KEY = ("target", "abc", "draft", "xyz")
DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))


def answer(right: int, wrong: int) -> DraftRounds:
    return DraftRounds(right + wrong, right)


def test_enough_rounds_are_known_in_the_next_process() -> None:
    history = PairHistory(KEY)
    history.observe(answer(30, 30))
    history.save()
    assert PairHistory(KEY).first_acceptance() is None  # too few
    history.observe(answer(30, 30))
    history.save()
    assert PairHistory(KEY).first_acceptance() == 0.5
    assert PairHistory(KEY).first_draft_tokens == (120, 60)
    assert PairHistory((*KEY[:3], "another")).first_acceptance() is None


@pytest.mark.parametrize(
    ("later_s", "acceptance"), [(60.0, 0.5), (2 * DAY_S, None), (365 * DAY_S, None), (-60.0, None)]
)
def test_a_day_later_and_where_the_clock_was_set_back_it_says_nothing(
    later_s: float, acceptance: float | None
) -> None:
    history = PairHistory(KEY)
    history.observe(answer(100, 100))
    history.save()
    assert PairHistory(KEY, lambda: time.time() + later_s).first_acceptance() == acceptance


def test_what_two_processes_count_is_kept() -> None:
    first, second = PairHistory(KEY), PairHistory(KEY)
    for history in (first, second, second):
        history.observe(answer(200, 50))
        history.save()
        history.save()  # once
    assert second.first_draft_tokens == (750, 600)
