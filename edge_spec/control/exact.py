"""Exact mode: speculative text equal to plain text of the same mode, bit for bit.

A kernel may give a row other logits in a pass of another width, and near ties then flip. Exact
mode scores chains only, and only at widths at which rows were measured to be bit-identical on
this machine (numerics.py); plain steps are padded to the narrowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.control.policy import Policy, RoundPlan
from edge_spec.core.metrics import RoundStats
from edge_spec.drafters.protocol import Budget, Drafter


class ExactPolicy:
    """Another policy's plans, cut and padded to `widths`, ascending and not empty."""

    def __init__(self, policy: Policy, widths: Sequence[int]) -> None:
        self._policy = policy
        self._widths = widths

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        """The narrowest width has to fit the budget's rows."""
        widths = [width for width in self._widths if width <= budget.num_rows]
        num_draft_tokens = min(budget.num_draft_tokens, widths[-1] - 1)
        chains = Budget(num_draft_tokens, widths[-1], branches=False, probes=False)
        plan = self._policy.choose(drafters, pending, chains)
        tree = plan.tree.chain_first(widths[-1])
        tree = tree.first_rows(tree.leading_chain)
        return RoundPlan(tree, plan.plain_reason, min(w for w in widths if w >= len(tree)))

    def wants(self, drafter: Drafter) -> bool:
        return self._policy.wants(drafter)

    def observe(self, round_stats: RoundStats) -> None:
        self._policy.observe(round_stats)
