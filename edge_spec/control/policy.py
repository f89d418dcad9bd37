"""What to verify in the next round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.metrics import PlainReason
from edge_spec.tree import TokenTree

DEFAULT_DRAFT_TOKENS = 15


class Plan(NamedTuple):
    tree: TokenTree
    plain_reason: PlainReason | None  # set exactly where the tree holds no guess
    num_rows: int | None = None  # rows of the pass, if more than the tree's: padding is not read


class Policy(Protocol):
    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> Plan:
        """The tree of the next round, with at most the budget's rows."""


class FixedPolicy:
    """Verifies the first drafter's proposal as far as it is likely enough to be right.

    A row is kept while the chance that it and all rows above it are right is at least
    `min_confidence`. On the measured CPU one more row costs 0.1 to 0.25 of a plain step
    (docs/benchmarks.md), so a row has to win that back at the current speedup.
    """

    def __init__(
        self,
        max_draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        min_confidence: float = 0.4,
        trees: bool = True,
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.trees = trees  # whether rows may branch (Capabilities.trees)
        self.min_confidence = min_confidence

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> Plan:
        plain = TokenTree.chain(pending)
        count = min(budget.num_draft_tokens, self.max_draft_tokens)
        if not drafters:
            return Plan(plain, PlainReason.OFF)
        if count <= 0:
            return Plan(plain, PlainReason.BUDGET)
        for drafter in drafters:
            tree = drafter.propose(pending, Budget(count, budget.num_rows))
            tree = tree if self.trees else tree.first_chain()
            if len(tree) > 1:
                likely = tree.first_rows(min(self._likely_rows(tree), budget.num_rows))
                below = PlainReason.BELOW_BREAK_EVEN if len(likely) == 1 else None
                return Plan(likely, below)
        return Plan(plain, PlainReason.NO_CANDIDATE)

    def _likely_rows(self, tree: TokenTree) -> int:
        """How many leading rows are each reached and right with min_confidence or more."""
        reached = np.empty(len(tree))
        reached[0] = 1.0
        for row in range(1, len(tree)):
            reached[row] = reached[tree.parents[row]] * tree.confidence[row]
        unlikely = np.flatnonzero(reached < self.min_confidence)
        return int(unlikely[0]) if len(unlikely) else len(tree)
