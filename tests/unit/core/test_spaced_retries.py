"""Rests that become longer the more often an attempt fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.spaced_retries import SpacedRetries


@given(
    first=st.integers(1, 50),
    doublings=st.integers(0, 8),
    outcomes=st.lists(st.booleans(), max_size=40),
)
def test_rests_double_up_to_the_longest_and_begin_short_after_a_success(
    first: int, doublings: int, outcomes: list[bool]
) -> None:
    longest = first * 2**doublings
    rests, failures = SpacedRetries(first, longest), 0
    for succeeded in outcomes:
        if succeeded:
            rests.reset()
            failures = 0
            continue
        rests.rest()
        assert rests.resting == min(first * 2**failures, longest)
        for left in range(rests.resting, 0, -1):
            assert rests.resting == left
            rests.count()
        rests.count()  # an attempt that took place meanwhile
        assert rests.resting == 0
        failures += 1


def test_a_rest_may_be_longer_than_its_turn_but_not_than_the_longest() -> None:
    rests = SpacedRetries(4, 64, resting=3)
    assert rests.resting == 3
    found = []
    for at_least in (10, 0, 1000, 0):
        rests.rest(at_least)
        found.append(rests.resting)
    assert found == [10, 8, 64, 32]
