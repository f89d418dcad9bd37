"""A policy for drafters that cost something: it uses those that pay and never loses much.

Time is simulated: a plain step takes one second, and nothing else tells the policy about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from edge_spec.core.metrics import PlainReason
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, DrafterTraits
from edge_spec.drafters.tree_builder import LearntAcceptance
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.drafter_record import FIRST, INCOME, NAMED
from fixtures.costly_drafts import Clock, DraftingAtCost, Share, pass_s, policy_of, stats_of

ROUNDS = 2000
BUDGET = Budget(15, 16)


@dataclass
class Simulated:
    seconds: float = 0.0
    tokens: int = 0
    reasons: Counter[PlainReason | None] = field(default_factory=Counter)
    by_round: list[float] = field(default_factory=list)  # seconds a token
    plans: list[int] = field(default_factory=list)  # rows

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens


def simulate(
    clock: Clock,
    policy: AdaptivePolicy,
    drafters: Sequence[DraftingAtCost],
    rounds: int = ROUNDS,
    noise: float = 0.03,
    around_s: float = 0.05,
    pause_at: int | None = None,
    slower: Callable[[int], float] = lambda number: 1.0,
) -> Simulated:
    """noise: standard deviation of a pass; around_s: of a round, outside draft tokens and the pass;
    pause_at: the round in whose pass the machine slept for an hour."""
    rng, result = np.random.default_rng(1), Simulated()
    for number in range(rounds):
        for each in drafters:
            each.round = number
        start = clock.now
        plan = policy.choose(drafters, 0, BUDGET)
        drafted = clock.now
        rows = len(plan.tree)
        forward_s = slower(number) * pass_s(rows) * max(0.5, 1 + noise * rng.normal())
        forward_s += 3600 if number == pause_at else 0
        clock.now += forward_s + around_s
        accepted = 0
        for each in drafters:
            mine = rows > 1 and plan.tree.proposed_by[1] == each.name
            right = each.outcome(rows - 1 if mine else 0)
            accepted = right if mine else accepted
        total_s = clock.now - start
        policy.observe(stats_of(plan, accepted, drafted - start, forward_s, total_s))
        result.seconds += total_s
        result.tokens += accepted + 1
        result.reasons[plan.plain_reason] += 1
        result.by_round.append(total_s / (accepted + 1))
        result.plans.append(rows)
    return result


PLAIN_S = 1.05  # of a plain round


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("draft_token_s", [0.02, 0.1, 0.3, 0.6, 0.9, 1.5, 5.0])
@pytest.mark.parametrize("right", [0.0, 0.2])
def test_a_useless_draft_costs_at_most_three_percent(
    right: float, draft_token_s: float, known: bool
) -> None:
    """Whether or not its speed was measured before, and whatever it is."""
    clock = Clock()
    policy = policy_of(clock, {"draft": draft_token_s} if known else None)
    result = simulate(clock, policy, [DraftingAtCost(clock, draft_token_s, right)])
    assert result.token_s < 1.03 * PLAIN_S
    if right == 0:
        plain = result.reasons[PlainReason.COOLDOWN] + result.reasons[PlainReason.BELOW_BREAK_EVEN]
        assert plain > 0.9 * ROUNDS


@pytest.mark.parametrize("draft_token_s", [0.02, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("right", [0.5, 0.7, 0.8])
def test_no_draft_costs_more_than_three_percent(right: float, draft_token_s: float) -> None:
    """Near break-even too, where luck decides."""
    clock = Clock()
    result = simulate(clock, policy_of(clock), [DraftingAtCost(clock, draft_token_s, right)])
    assert result.token_s < 1.03 * PLAIN_S


@pytest.mark.parametrize(
    ("draft_token_s", "right"), [(0.02, 0.8), (0.1, 0.8), (0.1, 0.95), (0.3, 0.9)]
)
def test_a_draft_that_pays_is_used(draft_token_s: float, right: float) -> None:
    """It gains nearly what the best fixed count of draft tokens would, by Leviathan's formula and
    these costs, which nobody knows beforehand; some is lost to learning and to lengths that
    vary."""
    clock = Clock()
    drafter = DraftingAtCost(clock, draft_token_s, right)
    result = simulate(clock, policy_of(clock), [drafter])
    best = max(
        (1 - right ** (count + 1))
        / (1 - right)
        / (count * draft_token_s + pass_s(count + 1) + 0.05)
        for count in range(16)
    )
    assert 0.9 * best < 1 / result.token_s < 1.02 * best
    assert len(drafter.asked) > 0.85 * ROUNDS  # it begins overconfident, and may rest for that once


def test_a_draft_slower_than_its_target_is_seldom_asked_and_for_single_draft_tokens() -> None:
    clock = Clock()
    drafter = DraftingAtCost(clock, 1.5, 0.9)
    result = simulate(clock, policy_of(clock), [drafter])
    assert {budget.num_draft_tokens for budget in drafter.budgets} == {1}
    assert 2 <= len(drafter.asked) <= 6  # it may have been slow because the machine was busy
    assert result.token_s < 1.01 * PLAIN_S


def test_a_draft_that_was_once_timed_as_slow_is_timed_again_and_then_rests() -> None:
    """The machine may have been busy then; three answers of one token tell."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 1.5, 0.9)
    result = simulate(clock, policy_of(clock, {"draft": 1.5}), [drafter], rounds=1000)
    assert 1 <= len(drafter.asked) <= 3
    assert {budget.num_draft_tokens for budget in drafter.budgets} == {1}
    assert result.reasons[PlainReason.BELOW_BREAK_EVEN] > 0


@pytest.mark.parametrize("named", [False, True])
def test_a_draft_that_was_timed_on_a_busy_machine_is_used_from_the_first_text(named: bool) -> None:
    """It took six times as long as it does now."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.2, 0.9)
    policy = policy_of(clock, {"draft": 1.2}, named={"draft"} if named else ())
    assert policy.wants(drafter)
    policy.begin(100)
    result = simulate(clock, policy, [drafter], rounds=100)
    assert len(drafter.asked) > 60
    assert result.token_s < 0.8 * PLAIN_S


def test_a_text_that_becomes_easy_is_noticed() -> None:
    """Although the draft has a long text to catch up with when it is tried again."""
    clock = Clock()
    drafter = DraftingAtCost(
        clock, 0.1, lambda number: 0.0 if number < 300 else 0.9, catch_up_s=0.01
    )
    result = simulate(clock, policy_of(clock), [drafter], rounds=3000)
    assert np.mean(result.by_round[:300]) < 1.1 * PLAIN_S
    late = result.by_round[-500:]
    assert len(late) / sum(1 / seconds for seconds in late) < 0.75 * PLAIN_S


def test_a_text_that_becomes_hard_is_noticed() -> None:
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.1, lambda number: 0.9 if number < 500 else 0.0)
    result = simulate(clock, policy_of(clock), [drafter], rounds=1500)
    assert np.mean(result.plans[:500]) > 4
    lost = sum(result.by_round[500:]) - 1000 * PLAIN_S
    assert lost < 0.05 * 1000


def test_a_machine_that_becomes_slower_sends_no_drafter_to_rest() -> None:
    """Three times, at once, and with noise: plain steps have become as slow, which is only not
    known yet."""
    clock = Clock()
    policy, drafter = policy_of(clock, free={"draft"}), DraftingAtCost(clock, 0.0, 0.62)

    def slower(number: int) -> float:
        return 3.0 if number // 200 % 2 else 1.0

    result = simulate(clock, policy, [drafter], rounds=1200, noise=0.2, slower=slower)
    assert len(drafter.asked) > 1000
    # Half of the rounds are slower by 3. With all of them drafting it gains 1.7.
    assert 2 * PLAIN_S / result.token_s > 1.35


def test_a_machine_that_slept_says_nothing_about_its_draft() -> None:
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.1, 0.8)
    simulate(clock, policy_of(clock), [drafter], rounds=300, pause_at=100)
    assert len(drafter.asked) > 290


@pytest.mark.parametrize("order", ["useless first", "useful first"])
def test_of_several_drafters_each_is_judged_by_what_it_does(order: str) -> None:
    """The one that is asked in vain rests, and the one that drafts after it goes on."""
    clock = Clock()
    vain = DraftingAtCost(clock, 0.4, 0.0, name="vain", catch_up_s=0.01)
    useful = DraftingAtCost(clock, 0.1, 0.85, name="useful")
    drafters = [vain, useful] if order == "useless first" else [useful, vain]
    result = simulate(clock, policy_of(clock), drafters)
    assert len(useful.asked) > 0.85 * ROUNDS
    assert len(vain.asked) < 0.1 * ROUNDS
    assert PLAIN_S / result.token_s > 1.6


class LookingUp(DraftingAtCost):
    """Finds a token in half of the rounds, and another one than the model drafts."""

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        tree = super().propose(pending, budget)
        return replace(tree, tokens=np.where(np.arange(len(tree)) > 0, 2, tree.tokens))


@pytest.mark.parametrize("draft_token_s", [0.1, 0.4, 0.8])
def test_a_draft_that_does_not_pay_leaves_what_is_looked_up(draft_token_s: float) -> None:
    """In a hundred rounds, as one answer has them."""
    taken = []
    for with_draft in (False, True):
        clock = Clock()
        found = LookingUp(clock, 1e-4, 0.8, name="looked up", candidates=0.5)
        drafters: list[DraftingAtCost] = [found]
        if with_draft:
            drafters.append(DraftingAtCost(clock, draft_token_s, 0.1))
        policy = policy_of(clock, free={"looked up"})
        taken.append(simulate(clock, policy, drafters, rounds=100, noise=0).token_s)
    assert taken[0] < 0.75 * PLAIN_S
    assert taken[1] < 1.08 * taken[0]  # what the account of a text pays for


class Saying(DraftingAtCost):
    """Proposes a chain with given confidences, sampled or not."""

    def __init__(self, clock: Clock, confidence: Sequence[float], sampled: bool) -> None:
        super().__init__(clock, 0.0, 1.0)
        self.confidence = confidence
        self.sampled = sampled

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        tree = TokenTree.chain(pending, [1] * len(self.confidence), self.confidence, self.name)
        probs = (None, *[np.full(4, 0.25, np.float32)] * len(self.confidence))
        return replace(tree, draft_probs=probs) if self.sampled else tree


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sampled_row_is_kept_or_dropped_whatever_comes_behind_it(sampled: bool) -> None:
    """What comes after it depends on its token, and a sampled token must not be dropped for what
    it is. Deterministic draft tokens may be: where the third row makes the second one cheap,
    say."""
    clock = Clock()
    costs = RowCosts({1: 1.0, 2: 1.1, 3: 1.9, 4: 1.9})
    kept = []
    for last in (0.05, 0.99):
        policy = AdaptivePolicy(costs, {}, {"draft"}, branches=False, clock=clock)
        drafter = Saying(clock, [0.9, 0.62, last], sampled)
        kept.append(
            len(policy.choose([drafter], 0, BUDGET).tree) >= 3
        )  # the second draft token is in
    assert kept == [True, True] if sampled else kept == [False, True]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sampled_plan_is_not_held_against_another(sampled: bool) -> None:
    """Its rate depends on its tokens; a deterministic one may be dropped."""
    clock = Clock()
    policy = policy_of(clock)
    free = Saying(clock, [0.9, 0.9, 0.9], sampled=False)
    costly = Saying(clock, [0.5], sampled)
    free.name, costly.name = "free", "costly"
    policy._record(costly).drafted(0.1, 8)  # its rounds have been the best
    plan = policy.choose([free, costly], 0, BUDGET)
    assert plan.tree.proposed_by[1] == ("costly" if sampled else "free")


def test_a_drafter_that_observes_for_longer_than_it_wins_skips_rounds() -> None:
    clock = Clock()
    drafter, policy = DraftingAtCost(clock, 0.1, 0.8), policy_of(clock)
    skipped = 0
    for _ in range(200):
        start = clock.now
        plan = policy.choose([drafter], 0, BUDGET)
        right = drafter.outcome(len(plan.tree) - 1)
        is_watched = drafter.name not in plan.resting
        clock.now += 3.0 if is_watched else 0.0
        draft_s, forward_s = clock.now - start, pass_s(len(plan.tree))
        policy.observe(stats_of(plan, right, draft_s, forward_s, draft_s + forward_s))
        drafter.round += 1
        skipped += not is_watched
    assert skipped > 190


def test_the_same_rounds_make_the_same_plans() -> None:
    results = []
    for _ in range(2):
        clock = Clock()
        drafters = [DraftingAtCost(clock, 0.1, 0.6), DraftingAtCost(clock, 0.3, 0.5, name="other")]
        results.append(simulate(clock, policy_of(clock), drafters, rounds=500))
    assert results[0] == results[1]


class Head(DraftingAtCost):
    """A trained head, of which its files may report how often it was right."""

    traits = DrafterTraits(head="eagle")
    reported: tuple[float, ...] = ()

    @property
    def reported_acceptance(self) -> Sequence[float]:
        return self.reported


def lost(drafter: DraftingAtCost, clock: Clock, rounds: int = 100) -> float:
    """Plain rounds, over those that the tokens would have taken without drafting."""
    found = simulate(clock, policy_of(clock), [drafter], rounds, noise=0)
    return found.seconds / (pass_s(1) + 0.05) - found.tokens


@pytest.mark.parametrize("reported", [(), (0.1, 0.1), (0.9, 0.9)])
def test_a_drafter_that_does_not_pay_loses_little_in_its_first_answer(
    reported: tuple[float, ...],
) -> None:
    """A draft token costs 0.2 steps and is right once in ten times, which the drafter has yet to
    learn: without its report, by it, or although that is wrong."""
    clock = Clock()
    head = Head(clock, 0.2, 0.1)
    head.reported = reported
    assert lost(head, clock) < 3  # the account, and its income


class KnownDraft(DraftingAtCost):
    """A draft of whose pair earlier answers are known."""

    traits = DrafterTraits(draft_model=True)
    known: tuple[float, ...] = ()

    @property
    def reported_acceptance(self) -> Sequence[float]:
        return self.known


def known_draft(clock: Clock, right: Share, known: float | None) -> KnownDraft:
    draft = KnownDraft(clock, 0.2, right)
    draft.known = () if known is None else (known,) * 4
    return draft


def test_what_other_sessions_found_silences_no_draft_in_this_one() -> None:
    """Their texts were hard; these are not."""
    asked = []
    for known in (None, 0.1):
        clock = Clock()
        draft = known_draft(clock, 0.9, known)
        policy = policy_of(clock, {"draft": 0.2})
        assert policy.wants(draft)
        policy.begin(100)
        simulate(clock, policy, [draft], 100, noise=0)
        asked.append(len(draft.asked))
    assert asked[1] > 0.8 * asked[0]


def test_a_named_drafter_may_lose_more_at_first() -> None:
    """But no more than its account, and only once."""
    clock, losses = Clock(), []
    for named in ((), ("draft",)):
        draft = DraftingAtCost(clock, 0.2, 0.0)
        policy = policy_of(clock, {"draft": 0.2}, named=named)
        for _ in range(2):
            policy.begin()
            found = simulate(clock, policy, [draft], 100, noise=0)
            losses.append(found.seconds / PLAIN_S - found.tokens)
    first, second, named_first, named_second = losses
    assert first < named_first < NAMED + 100 * INCOME
    assert max(second, named_second) < FIRST + 100 * INCOME


def test_beliefs_say_in_plain_words_what_is_known() -> None:
    clock = Clock()
    policy = policy_of(clock, {"draft": 0.1})
    draft = DraftingAtCost(clock, 0.1, 1.0)
    policy.wants(draft)
    expected = "verifying a draft token costs 12% of a decoding step; draft: not enough to tell"
    assert policy.beliefs() == expected
    simulate(clock, policy, [draft], 50, noise=0)
    assert policy.beliefs().endswith("; draft: 100% right")


def looked_up(clock: Clock, measured: dict[int, float], right: float) -> Simulated:
    """300 rounds with draft tokens that cost nothing, of a drafter that knows how good they are, at
    costs that were measured so; a pass takes what `pass_s` says."""
    drafter = DraftingAtCost(clock, 0.0, right, name="lookup")
    drafter.learnt = LearntAcceptance([right])
    costs = RowCosts(measured)
    policy = AdaptivePolicy(costs, {}, {"lookup"}, branches=False, clock=clock)
    return simulate(clock, policy, [drafter], 300)


@pytest.mark.parametrize("right", [0.4, 0.5, 0.8])
def test_costs_that_were_measured_on_a_busy_machine_are_found_out(right: float) -> None:
    """Passes took 2.5 times as long then, and a further row 0.8 of the first one, for which no
    draft token here is worth its row. Of the time that is won with costs from a quiet machine,
    at least two thirds are won from the start, and most rounds draft in the end."""
    quiet = looked_up(Clock(), {rows: pass_s(rows) for rows in (1, 2, 4, 8)}, right)
    busy = looked_up(Clock(), {1: 2.5, 2: 4.5, 4: 8.0, 8: 16.0}, right)
    assert PLAIN_S - busy.token_s > 0.66 * (PLAIN_S - quiet.token_s)
    assert np.mean([rows > 1 for rows in busy.plans[200:]]) > 0.55


def test_where_no_pass_was_timed_the_first_round_is_plain_and_tells_what_the_others_take() -> None:
    """Only the proportions of passes are known then."""
    clock = Clock()
    costs = RowCosts({1: 1.0, 2: 1.1, 8: 1.7}, is_measured=False)
    policy = AdaptivePolicy(costs, {}, clock=lambda: clock.now)
    drafter = DraftingAtCost(clock, 0.02, 0.8)
    result = simulate(clock, policy, [drafter])
    assert result.plans[0] == 1 and result.reasons[PlainReason.BASELINE] >= 1
    assert costs.at(1) == pytest.approx(pass_s(1), rel=0.3)
    known = simulate(clock, policy_of(clock), [DraftingAtCost(clock, 0.02, 0.8)])
    assert result.token_s < 1.05 * known.token_s


def test_while_no_account_pays_for_an_answer_nobody_is_asked_or_observes() -> None:
    clock = Clock()
    useless = DraftingAtCost(clock, 0.1, 0.0)
    policy = policy_of(clock, {"draft": 0.1})
    result = simulate(clock, policy, [useless], 400, noise=0)
    assert result.reasons[PlainReason.COOLDOWN] > 330
    plan = policy.choose([useless], 0, BUDGET)
    assert plan.resting == {"draft"} and plan.plain_reason == PlainReason.COOLDOWN
    assert 5 < len(useless.asked) < 60  # it is tried now and then


class SiblingsDrafter(DraftingAtCost):
    """Proposes three draft tokens that exclude each other, found by one pass."""

    passes = 1

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._clock.now += self.token_s
        return TokenTree(
            np.array([pending, 1, 2, 3], np.int32),
            np.array([-1, 0, 0, 0], np.int32),
            np.array([1.0, 0.5, 0.3, 0.15], np.float32),
            proposed_by=("", *(self.name,) * 3),
        )


def branching(clock: Clock, draft_token_s: dict[str, float]) -> AdaptivePolicy:
    costs = RowCosts({rows: pass_s(rows) for rows in (1, 2, 4, 8)})
    return AdaptivePolicy(costs, draft_token_s, clock=clock)


def test_an_account_that_does_not_pay_for_a_tree_pays_for_its_likeliest_rows() -> None:
    """A pass of the draft takes 0.2, a row 0.12 and at most a standard deviation more."""
    clock = Clock()
    found = []
    for balance in (1.5, 0.75, 0.5, 0.2):
        policy, drafter = branching(clock, {"draft": 0.2}), SiblingsDrafter(clock, 0.2, 0.9)
        policy.wants(drafter)
        policy.records["draft"].account.balance = balance
        plan = policy.choose([drafter], 0, BUDGET)
        assert plan.tree.tokens.tolist() == list(range(len(plan.tree)))
        found.append(len(plan.tree))
    assert found == [4, 3, 2, 1]
