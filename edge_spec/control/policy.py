"""Policies choose what is verified in the next round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.tree import TokenTree
from edge_spec.core.tree_pruning import chain_first, likeliest
from edge_spec.drafters.protocol import Budget, Drafter

DEFAULT_DRAFT_TOKENS = 15
_MAX_DRAFT_TOKENS = 7  # unlikely draft tokens after unlikely ones cost much and show little


class RoundPlan(NamedTuple):
    tree: TokenTree
    plain_reason: PlainReason | None  # set exactly where the tree holds no draft token
    num_rows: int | None = None  # rows of the pass, if more than the tree's: padding is not read
    num_verified: int | None = None  # leading rows that may be accepted, if fewer than the tree's
    # Of each row of a chain, the chance that it and all above it are right: a pass that others
    # share may score its first rows only. Empty: it is scored as a whole.
    values: tuple[float, ...] = ()
    resting: frozenset[str] = frozenset()  # drafters that were not asked, and skip the round


class Policy(Protocol):
    def begin(self, num_prompt: int = 0) -> None:
        """A text begins, about which nothing is known yet, after so many tokens of a prompt."""

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        """The tree of the next round, with at most the budget's rows."""

    def wants(self, drafter: Drafter) -> bool:
        """Says whether a drafter will be asked soon, so that it should read the prompt."""

    def observe(self, round_stats: RoundStats) -> None:
        """Learns from a round that has ended."""

    def beliefs(self) -> str:
        """Returns in a sentence what it goes by now; "" where it has learnt nothing."""


class FixedPolicy:
    """Verifies the rows of the first proposal that are likely enough to be right.

    A row is kept while the chance that it and all rows above it are right is at least
    `min_confidence`. On the measured CPU one more row costs 0.1 to 0.25 of a plain step
    (docs/benchmarks.md), so a row has to win that back at the current speedup.
    """

    def __init__(
        self,
        max_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        min_confidence: float = 0.4,
        branches: bool = True,
        probes: bool = True,
    ) -> None:
        """branches: whether draft tokens may branch; probes: whether, if not, rows beside the chain
        may be scored for what drafters learn from them."""
        self.max_draft_tokens = max_draft_tokens
        self.min_confidence = min_confidence
        self.branches = branches
        self.probes = probes

    def begin(self, num_prompt: int = 0) -> None: ...

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        limits = limited(
            budget, self.max_draft_tokens, self.branches, self.probes, self.min_confidence
        )
        if not drafters:
            return RoundPlan(TokenTree.chain(pending), PlainReason.OFF)
        if limits.num_draft_tokens <= 0:
            return RoundPlan(TokenTree.chain(pending), PlainReason.BUDGET)
        reason = PlainReason.NO_CANDIDATE
        for drafter in drafters:
            tree = drafter.propose(pending, limits)
            plan = cut(tree, limits, self.min_confidence)
            if plan is not None:
                return plan
            if len(tree) > 1:
                reason = PlainReason.BELOW_BREAK_EVEN
        return RoundPlan(TokenTree.chain(pending), reason)

    def wants(self, drafter: Drafter) -> bool:
        return True

    def observe(self, round_stats: RoundStats) -> None: ...

    def beliefs(self) -> str:
        return ""


def limited(
    budget: Budget, max_draft_tokens: int, branches: bool, probes: bool, min_reach: float = 0.0
) -> Budget:
    """The part of a budget that a policy uses; draft tokens may branch where both say so."""
    return Budget(
        min(budget.num_draft_tokens, max_draft_tokens),
        min(budget.num_rows, max_draft_tokens + 1),
        branches=branches and budget.branches,
        probes=probes and budget.probes,
        min_reach=min_reach,
    )


def cut(tree: TokenTree, limits: Budget, min_reach: float) -> RoundPlan | None:
    """The rows of a proposal that are likely enough to be reached and right, as a plan; None if
    there are none. Where draft tokens may not branch but do, which branch is kept depends on what
    was sampled there: the delta rule then verifies it, which holds for any draft token."""
    if tree.draft_probs and not (limits.branches or tree.is_chain):
        tree = replace(tree, draft_probs=())
    if limits.branches:
        likely = likeliest(tree, limits.num_rows, min_reach)
        num_verified = len(likely)
    else:
        likely = chain_first(tree, limits.num_rows, min_reach)
        num_verified = likely.leading_chain
        if not limits.probes:
            likely = likely.first_rows(num_verified)
    return RoundPlan(likely, None, num_verified=num_verified) if len(likely) > 1 else None


class AlwaysVerifyPolicy:
    """Draft tokens are verified however unlikely they are, up to 7 of them; several drafters take
    turns to go first. For proofs, where a wrong draft token tells as much.

    exercised: counts, under BRANCHES, the rounds whose verified draft tokens branch.
    """

    BRANCHES = "branches"

    def __init__(
        self,
        max_draft_tokens: int,
        branches: bool,
        probes: bool,
        exercised: Counter[str] | None = None,
    ) -> None:
        self._exercised = Counter() if exercised is None else exercised
        self._all = FixedPolicy(min(max_draft_tokens, _MAX_DRAFT_TOKENS), 0.0, branches, probes)
        self._turn = 0

    def begin(self, num_prompt: int = 0) -> None: ...

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        first = self._turn % max(1, len(drafters))
        self._turn += 1
        plan = self._all.choose([*drafters[first:], *drafters[:first]], pending, budget)
        if not plan.tree.first_rows(plan.num_verified or len(plan.tree)).is_chain:
            self._exercised[self.BRANCHES] += 1
        return plan

    def wants(self, drafter: Drafter) -> bool:
        return True

    def observe(self, round_stats: RoundStats) -> None: ...

    def beliefs(self) -> str:
        return ""
