"""Several conversations that share passes: each policy drafts what pays for all of them.

Time is simulated by tables of what passes take; policies, charges and bounds are the real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Session
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.batch import Batch
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.dealing import Wish, charge, deal_rows
from edge_spec.scheduler.lossless import ExactPolicy, Losslessness
from edge_spec.scheduler.policy import RoundPlan
from edge_spec.testing import ScriptedModel, random_logits

MODEL = ScriptedModel(random_logits(4), 4)
ROUNDS, WARM_UP = 300, 60
BUDGET = Budget(15, 16)
CONFIDENCES = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9, 0.97)  # of a text's next draft tokens, by turns


@dataclass(frozen=True)
class Machine:
    """What a pass takes, in ms: by itself, for each conversation, and for each row. widths: that
    rows agree at, the first of them that of a plain step."""

    fixed: float
    conversation: float
    row: float
    widths: Sequence[int]
    widest_shared: int

    def pass_ms(self, rows: Sequence[int]) -> float:
        return self.fixed + self.conversation * len(rows) + self.row * sum(rows)


ALL_WIDTHS = tuple(range(1, 17))
AVX512 = Machine(3.4, 1.9, 2.6, ALL_WIDTHS, 16)  # a server's processor with two cores
DEAR_ROWS = Machine(4.0, 0.5, 4.0, ALL_WIDTHS, 16)
AVX2 = Machine(20.0, 1.5, 5.0, tuple(range(2, 17, 2)), 16)  # a laptop whose plain step has two rows
GPU = Machine(8.0, 0.1, 0.02, ALL_WIDTHS, 64)


class Drafting(Drafter):
    """Says rightly how likely its draft tokens are; a stretch of text is of one kind. Fills free
    rows with anything."""

    name = "told"

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._left, self._confidence = 0, 0.0

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if not self._left:
            self._left = int(self._random.integers(1, 6))
            self._confidence = float(self._random.choice(CONFIDENCES))
        self._left -= 1
        count, reach = 0, self._confidence
        while count < budget.num_draft_tokens and reach > max(budget.min_reach, 0.05):
            count, reach = count + 1, reach * self._confidence
        count = max(count, min(budget.free_rows - 1, budget.num_draft_tokens))
        return TokenTree.chain(pending, [1] * count, [self._confidence] * count, self.name)

    def accepted(self, drafted: int) -> int:
        wrong = self._random.random(drafted) >= self._confidence
        return int(wrong.argmax()) if wrong.any() else drafted


@dataclass
class Conversation:
    drafter: Drafting
    policy: ExactPolicy
    session: Session
    rows: int = 0
    reasons: Counter[PlainReason | None] = field(default_factory=Counter)

    def plan(self, batch: Batch, drafts: bool) -> RoundPlan:
        budget = batch.limit(BUDGET, self.session, [self.drafter])
        return self.policy.choose([self.drafter] if drafts else [], 0, budget)


def costs_alone(machine: Machine) -> RowCosts:
    return RowCosts({rows: machine.pass_ms([rows]) / 1e3 for rows in (1, 2, 4, 8)})


def conversation(machine: Machine, seed: int) -> Conversation:
    adaptive = AdaptivePolicy(
        costs_alone(machine).padded(machine.widths),
        {},
        {Drafting.name},
        branches=False,
        clock=lambda: 0.0,
    )
    policy = ExactPolicy(adaptive, machine.widths)
    return Conversation(Drafting(seed), policy, MODEL.open_session())


class Shared(Batch):
    """Deals out rows and charges for them; the passes themselves are simulated."""

    def __init__(self, machine: Machine, num: int, equal_parts: bool) -> None:
        widths = tuple(range(1, machine.widest_shared + 1))
        super().__init__(MODEL, Losslessness(widths=widths), costs_alone(machine))
        self.active = self.most = num
        self._equal_parts = equal_parts

    def note(self, session: Session, plan: RoundPlan) -> None:
        if len(plan.tree) > 1 and plan.values and not self._equal_parts:
            self._divisible.add(session)
        elif len(plan.tree) > 1:
            self._divisible.discard(session)


@cache
def rate(
    machine: Machine, num: int, drafts: bool, equal_parts: bool = False
) -> tuple[float, list[Conversation]]:
    """Tokens a millisecond of all together, after a warm-up. equal_parts: nobody has more rows of a
    pass than another one may have."""
    batch, costs = Shared(machine, num, equal_parts), costs_alone(machine)
    talks = [conversation(machine, seed) for seed in range(num)]
    tokens, spent_ms = 0, 0.0
    for number in range(ROUNDS):
        plans = [talk.plan(batch, drafts) for talk in talks]
        for talk, plan in zip(talks, plans, strict=True):
            batch.note(talk.session, plan)
        if num > 1 and not equal_parts:
            plans = dealt(plans, machine, costs)
        rows = [len(plan.tree) for plan in plans]
        assert sum(rows) <= machine.widest_shared  # or somebody waits for another pass
        width = rows if num > 1 else [plans[0].num_rows or 1]
        pass_ms = machine.pass_ms(width)
        costs.observe(sum(rows), pass_ms / 1e3)
        charged = charge(costs, rows, pass_ms / 1e3)
        for talk, plan, charged_s in zip(talks, plans, charged, strict=True):
            accepted = talk.drafter.accepted(len(plan.tree) - 1)
            talk.policy.observe(round_stats(plan.tree, accepted, pass_ms / 1e3, charged_s, num))
            if number >= WARM_UP:
                tokens += accepted + 1
                talk.rows += len(plan.tree)
                talk.reasons[plan.plain_reason] += 1
        spent_ms += pass_ms if number >= WARM_UP else 0.0
    return tokens / spent_ms, talks


def dealt(plans: list[RoundPlan], machine: Machine, costs: RowCosts) -> list[RoundPlan]:
    """As shared passes deal their rows out."""
    wishes = [Wish(plan.values) if plan.values else Wish((1.0,), len(plan.tree)) for plan in plans]
    counts = deal_rows(wishes, machine.widest_shared, costs.at)
    return [
        plan._replace(
            tree=plan.tree.first_rows(count),
            plain_reason=PlainReason.SHARED if plan.values and count == 1 else plan.plain_reason,
        )
        for plan, count in zip(plans, counts, strict=True)
    ]


def round_stats(
    tree: TokenTree, accepted: int, pass_s: float, charged_s: float, num: int
) -> RoundStats:
    drafted = len(tree) - 1
    return RoundStats(
        num_rows=len(tree),
        num_draft_tokens=drafted,
        num_accepted=accepted,
        num_tokens=accepted + 1,
        plain_reason=None if drafted else PlainReason.NO_CANDIDATE,
        near_ties=0,
        draft_s=0.0,
        forward_s=pass_s,
        total_s=pass_s,
        tokens=(1,) * accepted + ((1,) if accepted == drafted else (2,)),
        charged_s=charged_s,
        num_sharing=num,
    ).as_charged()


@pytest.mark.parametrize("machine", [AVX512, DEAR_ROWS, AVX2, GPU])
@pytest.mark.parametrize("num", [1, 4, 8])
def test_drafting_never_loses_against_plain_decoding(machine: Machine, num: int) -> None:
    """2 % for what it tries."""
    drafted, _ = rate(machine, num, drafts=True)
    plain, _ = rate(machine, num, drafts=False)
    assert drafted > 0.98 * plain


@pytest.mark.parametrize("machine", [DEAR_ROWS, AVX2])
def test_drafting_fades_as_rows_cost_others_more(machine: Machine) -> None:
    """And the reason is counted: whoever plans its round, or the pass that all share, sees it."""
    rows = []
    for num in (1, 8):
        _, talks = rate(machine, num, drafts=True)
        reasons = sum((talk.reasons for talk in talks), Counter[PlainReason | None]())
        rows.append(sum(talk.rows for talk in talks) / reasons.total())
    assert rows[1] < 0.9 * rows[0]
    assert reasons[PlainReason.BELOW_BREAK_EVEN] + reasons[PlainReason.SHARED] > 0


def test_where_rows_are_free_drafting_goes_on() -> None:
    for num in (4, 8):
        drafted, _ = rate(GPU, num, drafts=True)
        plain, _ = rate(GPU, num, drafts=False)
        assert drafted > 1.5 * plain


@pytest.mark.parametrize(("machine", "num", "more"), [(GPU, 16, 1.25), (AVX512, 8, 1.05)])
def test_rows_go_where_they_bring_most(machine: Machine, num: int, more: float) -> None:
    """Over all conversations, against an equal part for each."""
    by_value, talks = rate(machine, num, drafts=True)
    equally, _ = rate(machine, num, drafts=True, equal_parts=True)
    assert by_value > more * equally
    assert sum(talk.reasons[PlainReason.SHARED] for talk in talks) > 0


def test_rows_that_plain_steps_fill_anyway_are_free_only_alone() -> None:
    """Shared passes are widened once for all: a conversation's second row costs there."""
    assert plain_share(1) < 0.05  # a cool-down now and then
    assert plain_share(4) > 0.3


def plain_share(num: int) -> float:
    """Of rounds without a draft token."""
    _, talks = rate(AVX2, num, drafts=True)
    reasons = sum((talk.reasons for talk in talks), Counter[PlainReason | None]())
    return 1 - reasons[None] / reasons.total()
