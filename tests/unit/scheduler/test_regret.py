"""What the policy may lose over plain decoding, whatever comes.

Time is simulated, in plain steps.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.tree_builder import LearntAcceptance
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.drafter_record import FIRST, INCOME, PUT_BY, RegretAccount
from fixtures.costly_drafts import Clock, DraftingAtCost, stats_of

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
    """Returns the most plain steps that one of the texts, of 100 rounds each, took beyond the
    accounts of its drafters."""
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
    for drafter in drafters:
        policy.wants(drafter)
    # A known time that says that a draft is too slow is not believed before it was seen here.
    slow = [each for each in drafters if is_known and not policy.records[each.name].is_measured]
    timed_s = 3 * sum(drafter.token_s for drafter in slow)
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
            accounts = len(drafters) * (FIRST + (INCOME + PUT_BY) * number)
            accounts += timed_s
            most = max(most, clock.now - start - written - accounts)
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
    for gain in (-1.1, -0.3, -0.1):
        assert -gain <= account.stake
        account.settle(gain)
        assert 0 < account.stake < account.balance
    account.settle(100.0)
    most = account.balance
    account.settle(100.0)
    assert account.balance == most < 10
    account.begin_text()
    assert account.balance == FIRST


def test_what_never_wins_is_paid_for_ever_more_seldom() -> None:
    """All that it may lose grows with the root of the rounds: 31 plain steps of 10,000."""
    account, spent = RegretAccount(), []
    for _ in range(10_000):
        lost_now = account.stake if account.stake > 0.5 else 0.0
        spent.append(lost_now)
        account.settle(-lost_now)
    assert sum(spent) == pytest.approx(31, abs=1.5)
    assert sum(spent[5000:]) < 0.6 * sum(spent[:5000])
    account.settle(4.0)  # it has won: from now on it may lose as at the beginning
    before = account.balance
    account.settle(0.0)
    assert account.balance - before == pytest.approx(INCOME, rel=0.02)


@pytest.mark.parametrize("stake", [0.1, 0.5, 1.6])
def test_a_stake_is_there_after_as_many_rounds_as_was_said(stake: float) -> None:
    account = RegretAccount()
    account.settle(-FIRST)
    rounds = account.rounds_to(stake)
    account.rest(rounds - 5, 0.0)
    assert account.stake < stake
    account.rest(rounds, 0.0)  # income falls meanwhile
    assert account.stake >= stake and account.rounds_to(stake) == 0


def test_what_there_is_to_read_is_put_by_as_it_is_written() -> None:
    left = {}
    for unread in (0.0, 0.004, 0.5):
        account = RegretAccount()
        account.settle(-FIRST)
        account.rest(50, unread)
        left[unread] = account.balance
    assert left[0.004] - left[0.0] == pytest.approx(50 * 0.004)
    assert left[0.5] - left[0.0] == pytest.approx(50 * PUT_BY)


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
        assert math.isfinite(costs.at(rows))
        assert math.isfinite(policy.records[drafter.name].account.balance)
        drafted += rows > 1 and number > 300
    assert drafted > 250
