"""Plain steps that are due only to see what they take."""

from __future__ import annotations

import pytest

from edge_spec.control.backoff import _LONGEST, _SHORTEST, Baseline
from edge_spec.core.metrics import RoundStats


def a_round(rows: int, forward_s: float = 1.0) -> RoundStats:
    return RoundStats(rows, rows - 1, 0, 1, None, 0, 0.0, forward_s, forward_s)


def rounds_until_due(baseline: Baseline, rows: int = 4) -> int:
    rounds = 0
    while not baseline.is_due and rounds <= _LONGEST:
        baseline.observe(a_round(rows), 1.0)
        rounds += 1
    return rounds


@pytest.mark.parametrize("rows", [2, 4])
def test_a_session_that_always_speculates_is_asked_for_one(rows: int) -> None:
    """Also where each round has a single draft token."""
    assert rounds_until_due(Baseline(), rows) == _SHORTEST


def test_plain_steps_of_its_own_postpone_it() -> None:
    baseline = Baseline()
    for _ in range(10 * _SHORTEST):
        baseline.observe(a_round(4), 1.0)
        baseline.observe(a_round(1), 1.0)
        assert not baseline.is_due


def test_what_is_known_well_is_asked_for_seldom() -> None:
    baseline, intervals = Baseline(), []
    for _ in range(8):
        intervals.append(rounds_until_due(baseline))
        baseline.observe(a_round(1, 1.05), 1.0)
    assert intervals[:3] == [_SHORTEST, 2 * _SHORTEST, 4 * _SHORTEST]
    assert intervals[-1] == _LONGEST


@pytest.mark.parametrize("forward_s", [0.7, 1.5])
def test_a_surprise_makes_it_due_soon_again(forward_s: float) -> None:
    baseline = Baseline()
    for taken_s in (1.0, 1.0, forward_s):
        rounds_until_due(baseline)
        baseline.observe(a_round(1, taken_s), 1.0)
    assert rounds_until_due(baseline) == _SHORTEST
