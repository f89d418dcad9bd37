"""A policy for drafters that cost something: it uses those that pay and never loses much.

Time is simulated: a plain step takes one second, and nothing else tells the policy about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cost import RowCosts, Scale
from edge_spec.core.metrics import PlainReason
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.protocol import Budget, DrafterTraits
from fixtures.costly_drafts import SLOPE, Clock, DraftingAtCost, Share, pass_s, policy_of, stats_of

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


def test_a_draft_that_is_known_to_be_slower_is_not_tried() -> None:
    """To find it slow again it would have to read the text, which costs as much as it may win."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 1.5, 0.9)
    policy = policy_of(clock, {"draft": 1.5})
    assert not policy.wants(drafter)  # it does not read the prompt
    result = simulate(clock, policy, [drafter])
    assert drafter.asked == []
    assert result.reasons.keys() == {PlainReason.BELOW_BREAK_EVEN, PlainReason.COOLDOWN}
    assert policy_of(clock, {"draft": 0.1}).wants(drafter)


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


def test_one_slow_draft_token_is_no_slow_draft() -> None:
    """The machine paused for a minute: a mean over draft tokens would take hundreds to forget
    that."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.1, 0.8)
    policy = policy_of(clock)
    simulate(clock, policy, [drafter], rounds=100)
    clock_before, drafter.token_s = drafter.token_s, 60.0
    simulate(clock, policy, [drafter], rounds=1)
    drafter.token_s = clock_before
    asked = len(drafter.asked)
    simulate(clock, policy, [drafter], rounds=1200)
    assert len(drafter.asked) - asked > 100


def test_a_machine_that_becomes_slower_sends_no_drafter_to_rest() -> None:
    """Three times, at once, and with noise: plain steps have become as slow, which is only not
    known yet."""
    clock = Clock()
    policy, drafter = policy_of(clock, free={"draft"}), DraftingAtCost(clock, 0.0, 0.62)

    def slower(number: int) -> float:
        return 3.0 if number // 200 % 2 else 1.0

    simulate(clock, policy, [drafter], rounds=1200, noise=0.2, slower=slower)
    assert len(drafter.asked) > 1150


def test_a_machine_that_slept_says_nothing_about_its_draft() -> None:
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.1, 0.8)
    simulate(clock, policy_of(clock), [drafter], rounds=300, pause_at=100)
    assert len(drafter.asked) > 290


def test_nor_does_one_that_slept_outside_of_a_pass() -> None:
    clock = Clock()
    policy, drafter = policy_of(clock), DraftingAtCost(clock, 1.5, 0.0)
    simulate(clock, policy, [], rounds=1, around_s=3600)
    simulate(clock, policy, [drafter], rounds=100)
    assert (
        len(drafter.asked) <= 6
    )  # a draft token that is slower than a step is not worth a draft token


def test_a_free_drafter_without_candidates_does_not_rest() -> None:
    """It takes hardly any time: noise alone must not send it away before the text repeats."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 1e-4, 0.9, candidates=0.0)
    simulate(clock, policy_of(clock), [drafter])
    assert len(drafter.asked) == ROUNDS


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


def test_a_drafter_whose_rounds_are_better_is_asked_although_another_has_a_draft_token() -> None:
    """A free draft token that is barely worth its row stands back; a sure one does not."""
    clock = Clock()
    weak = DraftingAtCost(clock, 1e-4, 0.3, name="weak", candidates=0.7)
    strong = DraftingAtCost(clock, 0.02, 0.9, name="strong")
    simulate(clock, policy_of(clock), [weak, strong], rounds=600)
    assert len([number for number in strong.asked if number >= 300]) > 270
    weak.name = "sure"
    weak._right = 0.97
    sure = simulate(clock, policy_of(clock), [weak], rounds=600)
    assert sure.token_s < 0.5 * PLAIN_S


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


def test_what_is_looked_up_stands_back_where_a_good_draft_says_otherwise() -> None:
    """It says that it is right more often than it is, as what was found in another passage is."""
    clock = Clock()
    found = LookingUp(clock, 1e-4, 0.4, name="looked up", candidates=0.5)
    draft = DraftingAtCost(clock, 0.05, 0.85)
    policy = policy_of(clock, free={"looked up"})
    together = simulate(clock, policy, [found, draft], rounds=400, noise=0).token_s
    clock = Clock()
    alone = simulate(clock, policy_of(clock), [DraftingAtCost(clock, 0.05, 0.85)], 400, noise=0)
    assert together < 1.04 * alone.token_s


@pytest.mark.parametrize("draft_token_s", [0.004, 0.1])
def test_a_draft_that_takes_little_is_asked_what_it_says_of_many_rows(draft_token_s: float) -> None:
    """Although rounds of what is looked up are better."""
    clock = Clock()
    found = LookingUp(clock, 1e-4, 0.8, name="looked up")
    draft = DraftingAtCost(clock, draft_token_s, 0.75)
    simulate(clock, policy_of(clock, free={"looked up"}), [found, draft], rounds=400)
    late = [number for number in draft.asked if number >= 100]
    assert len(late) > 270 if draft_token_s < 0.01 else len(late) < 30


def test_steps_in_the_costs_decide_how_many_rows_are_scored() -> None:
    """A kernel for four rows at a time: three cost as much as four, the fifth as much as all of
    the four before."""
    clock = Clock()
    costs = RowCosts({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 2.0, 7: 2.0, 8: 2.0})
    policy = AdaptivePolicy(costs, {}, {"draft"}, branches=False, clock=clock)
    drafter = DraftingAtCost(clock, 0.0, 0.7)
    drafter.learnt = LearntAcceptance([0.7])
    assert len(policy.choose([drafter], 0, BUDGET).tree) == 4


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


def test_a_drafter_is_not_charged_for_the_time_of_another() -> None:
    """Free draft tokens that come after a slow attempt would seem slow too."""
    clock = Clock()
    slow = DraftingAtCost(clock, 0.5, 0.0, name="slow")
    free = DraftingAtCost(clock, 1e-4, 0.5, name="free")
    simulate(clock, policy_of(clock), [slow, free])
    assert len(slow.asked) < 0.1 * ROUNDS
    assert len(free.asked) > 0.9 * ROUNDS


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


@pytest.mark.parametrize(
    ("drafters", "budget", "reason"),
    [
        (0, BUDGET, PlainReason.OFF),
        (1, Budget(0, 16), PlainReason.BUDGET),
        (1, BUDGET, PlainReason.NO_CANDIDATE),
    ],
)
def test_a_plain_round_says_why(drafters: int, budget: Budget, reason: PlainReason) -> None:
    clock = Clock()
    nothing = [DraftingAtCost(clock, 0.1, 0.5, candidates=0.0) for _ in range(drafters)]
    plan = policy_of(clock).choose(nothing, 7, budget)
    assert plan.plain_reason == reason and plan.tree.tokens.tolist() == [7]


def test_a_draft_token_that_is_too_unlikely_is_below_break_even() -> None:
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.01, 0.0)
    for _ in range(400):
        drafter.learnt.observe(0, False)
    plan = policy_of(clock).choose([drafter], 0, BUDGET)
    assert plan.plain_reason == PlainReason.BELOW_BREAK_EVEN


def test_the_budget_tells_a_drafter_how_likely_its_draft_tokens_have_to_be() -> None:
    """What a draft token and its row cost, over the time of a token: the one that follows has to be
    worth it, and a row that is there without a pass its row alone."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.25, 0.9)
    policy = policy_of(clock, {"draft": 0.25}, free={"draft"})
    assert policy.wants(drafter)
    policy.records["draft"].account.settle(6.0)  # there is enough for all of them
    policy.choose([drafter], 0, Budget(5, 9, probes=False))
    [budget] = drafter.budgets
    assert (budget.num_draft_tokens, budget.num_rows) == (5, 9)
    assert not (budget.branches or budget.probes)
    assert budget.min_reach == pytest.approx((0.25 + SLOPE) / 0.85)
    assert budget.least_reach == pytest.approx(SLOPE)


def test_slow_rounds_do_not_lower_what_draft_tokens_have_to_win() -> None:
    """A draft token is worth a token's time at the better of the rate and plain steps; otherwise
    losses would call for more of what caused them."""
    clock = Clock()
    drafter = DraftingAtCost(clock, 0.25, 0.0)
    policy = policy_of(clock, {"draft": 0.25})
    simulate(clock, policy, [drafter], rounds=40, around_s=0.0)
    assert min(budget.min_reach for budget in drafter.budgets if budget.num_draft_tokens > 1) > 0.33


def test_the_same_rounds_make_the_same_plans() -> None:
    results = []
    for _ in range(2):
        clock = Clock()
        drafters = [DraftingAtCost(clock, 0.1, 0.6), DraftingAtCost(clock, 0.3, 0.5, name="other")]
        results.append(simulate(clock, policy_of(clock), drafters, rounds=500))
    assert results[0] == results[1]


class Sampling(DraftingAtCost):
    """Offers siblings, and takes the shape that it is asked for."""

    def __init__(self, clock: Clock, acceptance: Sequence[float]) -> None:
        super().__init__(clock, 0.02, 0.5)
        self.acceptance = acceptance

    def sibling_acceptance(self) -> Sequence[float]:
        return self.acceptance


def test_the_end_of_a_text_leaves_no_small_shape_for_the_next() -> None:
    clock = Clock()
    policy = AdaptivePolicy(RowCosts({1: 1.0, 8: 1.1}), {"draft": 0.02}, clock=clock)
    drafter = Sampling(clock, (0.6, 0.2, 0.1))
    for rows in (2, 2, 16, 2, *[16] * 64, 2, 2, 16):
        policy.choose([drafter], 0, Budget(rows - 1, rows))
    shapes = [len(budget.shape) for budget in drafter.budgets]
    assert shapes[:4] == [2, 2, 16, 0]
    assert set(shapes[4:68]) == {16} and shapes[-1] == 16


def test_a_shape_follows_what_is_learnt() -> None:
    clock = Clock()
    costs = RowCosts({1: 1.0, 4: 1.0, 5: 4.0, 8: 4.0})
    policy = AdaptivePolicy(costs, {"draft": 0.3}, clock=clock)
    drafter = Sampling(clock, (0.4, 0.3, 0.2))
    for _ in range(70):
        policy.choose([drafter], 0, BUDGET)
        drafter.acceptance = (0.99, 0.001)
    assert drafter.budgets[0].shape == (-1, 0, 0, 0)
    assert drafter.budgets[-1].shape == (-1, 0, 1, 2)


def test_samples_are_asked_for_in_the_best_shape_where_draft_tokens_may_branch() -> None:
    clock = Clock()
    costs = RowCosts({1: 1.0, 4: 1.0, 5: 4.0, 8: 4.0})
    for branches, acceptance, shape in (
        (True, (0.4, 0.3, 0.2), (-1, 0, 0, 0)),
        (True, (0.9, 0.05), (-1, 0, 1, 2)),
        (True, (0.0, 0.0), ()),
        (True, (), ()),
        (False, (0.4, 0.3, 0.2), ()),
    ):
        drafter = Sampling(clock, acceptance)
        drafter_s = 0.3 if acceptance[:1] == (0.4,) else 0.02
        policy = AdaptivePolicy(costs, {"draft": drafter_s}, branches=branches, clock=clock)
        policy.choose([drafter], 0, BUDGET)
        assert drafter.budgets[0].shape == shape
        policy.choose([drafter], 0, Budget(15, 3))  # the shape is larger than what fits
        assert drafter.budgets[1].shape == ()


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


def test_a_draft_that_is_known_not_to_pay_is_not_even_read_for_a_while() -> None:
    """Each process would try it again, and a short answer is over before that is won back."""
    clock = Clock()
    draft = known_draft(clock, 0.1, 0.1)
    policy = policy_of(clock, {"draft": 0.2})
    assert not policy.wants(draft)
    simulate(clock, policy, [draft], 100, noise=0)
    assert not draft.asked
    simulate(clock, policy, [draft], 6000, noise=0)
    assert draft.asked  # it may have become better


def test_a_draft_writes_few_tokens_a_round_until_it_has_been_of_use() -> None:
    """An answer of 20 tokens loses a fifth of its time to one that is not: the trial, where eight
    draft tokens a round would lose more before it ends."""
    clock = Clock()
    wrong = known_draft(clock, 0.0, None)
    found = simulate(clock, policy_of(clock, {"draft": 0.2}), [wrong], 20, noise=0)
    assert found.token_s < 1.25 * (pass_s(1) + 0.05)
    assert max(budget.num_draft_tokens for budget in wrong.budgets) <= 3
    clock = Clock()
    right = known_draft(clock, 0.9, None)
    simulate(clock, policy_of(clock, {"draft": 0.2}), [right], 20, noise=0)
    assert right.budgets[-1].num_draft_tokens == BUDGET.num_draft_tokens


def test_a_draft_that_is_known_to_pay_may_be_unlucky_at_first() -> None:
    """As long as the account pays for it."""
    found = {}
    for known in (0.7, 0.15):
        clock = Clock()
        unlucky = known_draft(clock, lambda number: 0.0 if number < 1 else 0.8, known)
        policy = policy_of(clock, {"draft": 0.2})
        found[known] = simulate(clock, policy, [unlucky], 100, noise=0)
    assert found[0.7].reasons[PlainReason.COOLDOWN] == 0
    assert found[0.15].reasons[PlainReason.COOLDOWN] > 50
    assert found[0.7].token_s < 0.8 * found[0.15].token_s


def test_so_may_a_head_that_is_reported_to_pay() -> None:
    clock = Clock()
    head = Head(clock, 0.05, lambda number: 0.0 if number < 2 else 0.8)
    head.reported = (0.6, 0.6)
    found = simulate(clock, policy_of(clock, {"draft": 0.05}), [head], 100, noise=0)
    assert found.reasons[PlainReason.COOLDOWN] == 0


def test_a_head_without_a_report_that_pays_is_used() -> None:
    clock = Clock()
    head = Head(clock, 0.1, 0.8)
    assert lost(head, clock, ROUNDS) < -0.2 * ROUNDS


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


@pytest.mark.parametrize("right", [0.3, 0.5, 0.8])
def test_costs_that_were_measured_on_a_quiet_machine_are_found_out(right: float) -> None:
    """The reverse: passes take twice as long now, and a further row six times."""
    quiet = looked_up(Clock(), {rows: pass_s(rows) for rows in (1, 2, 4, 8)}, right)
    busy = looked_up(Clock(), {1: 0.5, 2: 0.51, 4: 0.53, 8: 0.6}, right)
    assert PLAIN_S - busy.token_s > 0.75 * (PLAIN_S - quiet.token_s)


def test_where_no_pass_was_timed_the_first_round_is_plain_and_tells_what_the_others_take() -> None:
    """Only the proportions of passes are known then."""
    clock = Clock()
    costs = RowCosts({1: 1.0, 2: 1.1, 8: 1.7}, scale=Scale(is_known=False))
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


def test_a_drafter_reads_a_prompt_where_its_account_pays_for_an_answer() -> None:
    """One that has not read it has to read it before its next answer."""
    clock = Clock()
    useless = DraftingAtCost(clock, 0.1, 0.0, catch_up_s=0.005)
    policy = policy_of(clock, {"draft": 0.1})
    assert policy.wants(useless)
    policy.begin(50)
    simulate(clock, policy, [useless], 60, noise=0)
    record = policy.records["draft"]
    record.account.settle(-5.0)
    assert not policy.wants(useless)
    unread_s = record.unread_s(1.0)
    policy.begin(1000)
    assert record.unread_s(1.0) > unread_s
    record.account.settle(5.0)
    assert policy.wants(useless)
    policy.begin(1000)
    assert record.unread_s(1.0) == 0


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


def test_a_pass_of_a_draft_costs_the_same_however_many_siblings_it_finds() -> None:
    clock = Clock()
    policy = branching(clock, {})
    simulate(clock, policy, [SiblingsDrafter(clock, 0.2, 0.9)], 40, noise=0)
    assert policy.records["draft"].draft_token_s == pytest.approx(0.2)


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
