"""What the policy may lose over plain decoding, whatever comes.

Time is simulated, in plain steps.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cost import RowCosts
from edge_spec.control.regret import RegretAccount
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.protocol import Budget
from fixtures.costly_drafts import Clock, DraftingAtCost, stats_of

_ACCOUNT, _INCOME = 2.0, 0.02  # plain steps, and those a round
WIDTHS = (2, 3, 4, 5, 8, 12, 16)
STEPS = st.floats(0.0, 3.0)
TABLES = st.fixed_dictionaries({width: STEPS for width in WIDTHS})
OUTCOMES = st.lists(st.integers(0, 15), min_size=1, max_size=40)
DRAFT_TOKENS = st.lists(st.floats(0.0, 2.0), min_size=1, max_size=2)


class Fated(DraftingAtCost):
    """Its draft tokens are as often right as the outcomes say."""

    def fate(self, outcomes: list[int], claim: float) -> None:
        self.outcomes, self.asked_rounds = outcomes, 0
        self.learnt = LearntAcceptance([claim])

    def outcome(self, draft_tokens: int) -> int:
        right = self.outcomes[self.asked_rounds % len(self.outcomes)]
        self.asked_rounds += draft_tokens > 0
        return min(right, draft_tokens)


def lost(
    table: dict[int, float],
    draft_tokens: list[float],
    outcomes: list[int],
    claim: float,
    *,
    is_known: bool = True,
    texts: int = 3,
) -> float:
    """Returns the most plain steps that one of the texts, of 100 rounds each, took beyond its
    account."""
    clock = Clock()
    costs = {1: 1.0} | {width: 1.0 + more for width, more in table.items()}
    drafters = [
        Fated(clock, token_s, 0.5, name=f"draft {place}")
        for place, token_s in enumerate(draft_tokens)
    ]
    for drafter in drafters:
        drafter.fate(outcomes, claim)
    known = {drafter.name: drafter.token_s for drafter in drafters if is_known}
    policy = AdaptivePolicy(RowCosts(costs), known, branches=False, clock=clock)
    exact, most = RowCosts(costs), -1e9
    for _ in range(texts):
        policy.begin()
        start, written = clock.now, 0
        for number in range(1, 101):
            begun = clock.now
            plan = policy.choose(drafters, 0, Budget(15, 16))
            drafted, rows = clock.now, len(plan.tree)
            clock.now += exact.at(rows)
            accepted = 0
            for drafter in drafters:
                mine = rows > 1 and plan.tree.proposed_by[1] == drafter.name
                accepted += drafter.outcome(rows - 1) if mine else 0
            policy.observe(
                stats_of(plan, accepted, drafted - begun, exact.at(rows), clock.now - begun)
            )
            written += accepted + 1
            most = max(most, clock.now - start - written - _ACCOUNT - _INCOME * number)
    return most


@settings(max_examples=60, deadline=None)
@given(TABLES, DRAFT_TOKENS, OUTCOMES, st.floats(0.0, 1.0))
@example(dict.fromkeys(WIDTHS, 0.0), [0.3], [3, 0, 0, 0], 0.9)
@example(dict.fromkeys(WIDTHS, 0.3), [0.1, 0.5], [15] * 20 + [0] * 20, 0.9)
def test_no_text_takes_longer_than_plain_decoding_and_its_account(
    table: dict[int, float], draft_tokens: list[float], outcomes: list[int], claim: float
) -> None:
    """For any time of passes and drafters, which are known here, whatever these say of their draft
    tokens and whatever comes of them."""
    assert lost(table, draft_tokens, outcomes, claim) < 1e-6


@settings(max_examples=30, deadline=None)
@given(TABLES, DRAFT_TOKENS, OUTCOMES, st.floats(0.0, 1.0))
def test_drafters_that_are_not_known_take_their_first_answers_more(
    table: dict[int, float], draft_tokens: list[float], outcomes: list[int], claim: float
) -> None:
    """Which have one draft token each."""
    first_answers = 3 * sum(draft_tokens)
    assert lost(table, draft_tokens, outcomes, claim, is_known=False) < first_answers + 1e-6


def test_a_stake_is_a_part_of_what_is_left() -> None:
    account = RegretAccount()
    for gain in (-1.2, -0.3, -0.2):
        assert -gain <= account.balance
        account.settle(gain)
        assert 0 < account.stake < account.balance
    account.settle(100.0)
    most = account.balance
    account.settle(100.0)
    assert account.balance == most < 10
    account.begin_text()
    assert account.balance == _ACCOUNT


ODD_TIMES = [0.0, -1.0, 3600.0, math.nan, math.inf]


@pytest.mark.parametrize("seconds", ODD_TIMES)
@pytest.mark.parametrize("what", ["pass", "draft", "clock"])
def test_odd_times_leave_decisions_finite_and_drafting_possible(what: str, seconds: float) -> None:
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.05, 0.9)
    costs = RowCosts({1: 1.0, 2: 1.1, 8: 1.7})
    policy = AdaptivePolicy(costs, {}, branches=False, clock=clock)
    drafted = 0
    for number in range(600):
        is_odd = number in (3, 4, 11)
        begun = clock.now
        if is_odd and what == "clock":
            clock.now = begun + seconds
        plan = policy.choose([drafter], 0, Budget(15, 16))
        clock.now = begun + 1.0
        rows = len(plan.tree)
        accepted = drafter.outcome(rows - 1)
        forward_s = seconds if is_odd and what == "pass" else costs.measured.get(rows, 1.5)
        draft_s = seconds if is_odd and what == "draft" else 0.05 * (rows - 1)
        policy.observe(stats_of(plan, accepted, draft_s, forward_s, forward_s + draft_s))
        assert math.isfinite(costs.at(rows)) and math.isfinite(policy.account.balance)
        drafted += rows > 1 and number > 300
    assert drafted > 250
