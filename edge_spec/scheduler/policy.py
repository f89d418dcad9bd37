"""Policies choose what the next round verifies.

Also the best static tree for samples (Chen et al. 2024, Sequoia: Scalable and Robust Speculative
Decoding, section 3.1), by dynamic programming over measured acceptance and costs; and how many rows
of a proposal are worth verifying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.modes import DEFAULT_DRAFT_TOKENS
from edge_spec.core.tree import TokenTree, chain_first, likeliest
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.scheduler.cost import RoundCosts, RowCosts

# A draft token is the likeliest of several, so its chance is slightly overestimated (winner's
# curse). benchmarks/simulate.py compares other values.
_CAUTION = 1.2


def best_shape(
    acceptance: Sequence[float], costs: RowCosts, pass_s: float, max_rows: int, max_depth: int
) -> tuple[int, ...]:
    """Return the parents of the tree that commits most tokens per second; (-1,) if none beats
    plain.

    Parents precede children. acceptance: the chance that a row's first, second, ... sampled child
    is the accepted one. costs: of the target. pass_s: seconds of the draft per level.
    """
    gain = _Gain(tuple(acceptance))
    best, best_rate = (1, 0), 1 / costs.at(1)
    for depth in range(1, max_depth + 1):
        for rows in range(depth + 1, max_rows + 1):
            rate = gain.of_tree(rows, depth) / (costs.at(rows) + depth * pass_s)
            if rate > best_rate:
                best, best_rate = (rows, depth), rate
    parents = [-1]
    gain.unfold(*best, 0, parents)
    return tuple(parents)


class _Gain:
    """Expected tokens of the best trees: T[n, b] of the paper, with bounded depth."""

    def __init__(self, acceptance: tuple[float, ...]) -> None:
        self._acceptance = acceptance
        self._forest = lru_cache(maxsize=None)(self._best_forest)

    def of_tree(self, rows: int, depth: int) -> float:
        """Return the tokens of the best tree, root included, of up to `rows` rows and `depth`
        levels."""
        return 1 + (self._forest(rows - 1, depth, 0)[0] if depth else 0.0)

    def unfold(self, rows: int, depth: int, root: int, parents: list[int]) -> None:
        """Append that tree's rows below the row `root`, its children first."""
        left = rows - 1
        sizes: list[int] = []
        while depth and left and len(sizes) < len(self._acceptance):
            size = self._forest(left, depth, len(sizes))[1]
            if not size:
                break
            sizes.append(size)
            left -= size
        children = range(len(parents), len(parents) + len(sizes))
        parents += [root] * len(sizes)
        for child, size in zip(children, sizes, strict=True):
            self.unfold(size, depth - 1, child, parents)

    def _best_forest(self, rows: int, depth: int, rank: int) -> tuple[float, int]:
        """Return the gain of a row's children from `rank` on, and the rows of the first of them."""
        if rows <= 0 or rank == len(self._acceptance):
            return 0.0, 0
        best = (0.0, 0)
        for size in range(1, rows + 1):
            own = self._acceptance[rank] * self.of_tree(size, depth - 1)
            gain = own + self._forest(rows - size, depth, rank + 1)[0]
            if gain > best[0] + 1e-12:
                best = (gain, size)
        return best


def plan_rows(
    tree: TokenTree, reach: list[float], limits: Budget, rounds: RoundCosts
) -> RoundPlan | None:
    """Keep the most valuable number of the likeliest rows; None if it is none. reach: for each row,
    the chance that it and all its ancestors are right."""
    if len(tree) == 1:
        return None
    if tree.draft_probs or not (tree.is_chain or limits.branches):
        # Keeping a sampled row must not depend on its descendants, which depend on its token: use
        # one bound for all rows.
        return cut(tree, limits, rounds.row / rounds.token)
    if tree.required:
        reach = [1.0, *sorted(reach[1:], reverse=True)]
        num_rows = _best_rows(reach[: limits.num_rows], rounds)
        return cut(tree, limits, reach[num_rows - 1] if num_rows > 1 else 1.0)
    order = list(range(len(reach)))
    if not tree.is_chain:  # stable, and no row is likelier than its parent, so parents stay first
        order.sort(key=lambda row: -reach[row])
    likeliest = [reach[row] for row in order[: limits.num_rows]]
    num_rows = _best_rows(likeliest, rounds)
    if num_rows == 1:
        return None
    chosen = tree.first_rows(num_rows) if tree.is_chain else tree.select(order[:num_rows])
    return RoundPlan(chosen, None, values=tuple(likeliest[:num_rows]))


def _best_rows(reach: Sequence[float], rounds: RoundCosts) -> int:
    """Return the number of rows that gains most, trying all, since costs do not rise steadily."""
    rate = _CAUTION / (rounds.token * rounds.plain_s)
    further = rounds.further(len(reach))
    best, most, tokens = 1, -rate * further[0], 0.0
    for row in range(1, len(reach)):
        tokens += reach[row]
        won = tokens - rate * further[row]
        if won > most:
            best, most = row + 1, won
    return best


_MAX_DRAFT_TOKENS = 7  # further unlikely draft tokens cost much and show little


class RoundPlan(NamedTuple):
    tree: TokenTree
    plain_reason: PlainReason | None  # set exactly if the tree has no draft token
    num_rows: int | None = None  # width of the pass if padded; padding is not read
    num_verified: int | None = None  # leading rows that may be accepted, if not all
    # Chance of each row and its ancestors, likeliest first: a shared pass may score only the first
    # rows. Empty: score the whole tree.
    values: tuple[float, ...] = ()
    resting: frozenset[str] = frozenset()  # drafters that skip this round


class Policy(Protocol):
    def begin(self, num_prompt: int = 0) -> None:
        """Begin a text after a prompt of `num_prompt` tokens."""

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        """Return the tree of the next round, within the budget's rows."""

    def wants(self, drafter: Drafter) -> bool:
        """Return True if the drafter will be asked soon and should read the prompt."""

    def observe(self, round_stats: RoundStats) -> None:
        """Learn from a finished round."""

    def beliefs(self) -> str:
        """Return what the policy currently believes, in a sentence; "" if it learns nothing."""


class FixedPolicy:
    """Verify the rows of the first proposal that are likely enough to be right.

    A row is kept if it and its ancestors are right with a chance of at least `min_confidence`. With
    our kernels a row costs 0.06 to 0.15 of a plain step (benchmarks/results/rows.json), which it
    must regain at the current speedup.
    """

    def __init__(
        self,
        max_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        min_confidence: float = 0.4,
        branches: bool = True,
        probes: bool = True,
    ) -> None:
        """branches: draft tokens may branch. probes: without branches, rows off the chain may be
        scored for drafters to learn from."""
        self.max_draft_tokens = max_draft_tokens
        self.min_confidence = min_confidence
        self.branches = branches
        self.probes = probes

    def begin(self, num_prompt: int = 0) -> None: ...

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        if not drafters:
            return RoundPlan(TokenTree.chain(pending), PlainReason.OFF)
        limits = limited(
            budget, self.max_draft_tokens, self.branches, self.probes, self.min_confidence
        )
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
    """Return the part of a budget that a policy uses; both must allow branches and probes."""
    return Budget(
        min(budget.num_draft_tokens, max_draft_tokens),
        min(budget.num_rows, max_draft_tokens + 1),
        branches=branches and budget.branches,
        probes=probes and budget.probes,
        min_reach=min_reach,
    )


def cut(tree: TokenTree, limits: Budget, min_reach: float) -> RoundPlan | None:
    """Return the rows that are likely enough to be right as a plan; None if there are none.

    If samples branch but may not, the kept branch depends on them. The delta rule then verifies it,
    which is valid for any draft token.
    """
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


class AlwaysVerifyPolicy(FixedPolicy):
    """Verify up to 7 draft tokens however unlikely, in proofs; drafters take turns to go first.
    exercised: counts, under BRANCHES, rounds whose verified draft tokens branch."""

    BRANCHES = "branches"

    def __init__(
        self, max_draft_tokens: int, branches: bool, probes: bool, exercised: Counter[str]
    ) -> None:
        super().__init__(min(max_draft_tokens, _MAX_DRAFT_TOKENS), 0.0, branches, probes)
        self._exercised = exercised
        self._turn = 0

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        first = self._turn % max(1, len(drafters))
        self._turn += 1
        plan = super().choose([*drafters[first:], *drafters[:first]], pending, budget)
        if not plan.tree.first_rows(plan.num_verified or len(plan.tree)).is_chain:
            self._exercised[self.BRANCHES] += 1
        return plan


class WithinPolicy:
    """Forwards to another policy, for subclasses that narrow its choice."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def begin(self, num_prompt: int = 0) -> None:
        self._policy.begin(num_prompt)

    def wants(self, drafter: Drafter) -> bool:
        return self._policy.wants(drafter)

    def observe(self, round_stats: RoundStats) -> None:
        self._policy.observe(round_stats)

    def beliefs(self) -> str:
        return self._policy.beliefs()
