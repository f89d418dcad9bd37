"""Text that is plain text of the same mode, bit for bit.

A kernel may give a row other logits in a pass of another width, and near ties then flip. So passes
keep to widths at which rows were measured to be bit-identical on this machine
(batch_invariance.py); plain steps are padded to the narrowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge_spec.control.policy import Policy, RoundPlan
from edge_spec.core.metrics import RoundStats
from edge_spec.core.tree_pruning import chain_first
from edge_spec.drafters.protocol import Budget, Drafter


class ExactPolicy:
    """Another policy's plans, cut and padded to `widths`, ascending and not empty.

    Only chains are kept: where the rows of a branch were seen to agree, rounding may have hidden
    that they do not. probes: whether a chain's rows agree where others come after it, which it does
    not see.
    """

    def __init__(self, policy: Policy, widths: Sequence[int], probes: bool = False) -> None:
        self._policy = policy
        self._widths = widths
        self._probes = probes

    def begin(self) -> None:
        self._policy.begin()

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        """The narrowest width has to fit the budget's rows."""
        widths = [width for width in self._widths if width <= budget.num_rows]
        limits = replace(
            budget,
            num_draft_tokens=min(budget.num_draft_tokens, widths[-1] - 1),
            num_rows=widths[-1],
            branches=False,
            probes=budget.probes and self._probes,
        )
        plan = self._policy.choose(drafters, pending, limits)
        tree = chain_first(plan.tree, widths[-1])
        verified = tree.leading_chain
        if not limits.probes:
            tree = tree.first_rows(verified)
        width = min(width for width in widths if width >= len(tree))
        values = plan.values[: len(tree)] if tree.is_chain and verified == len(tree) else ()
        return RoundPlan(tree, plan.plain_reason, width, verified, values)

    def wants(self, drafter: Drafter) -> bool:
        return self._policy.wants(drafter)

    def observe(self, round_stats: RoundStats) -> None:
        self._policy.observe(round_stats)
