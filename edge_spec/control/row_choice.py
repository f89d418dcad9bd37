"""Chooses how many rows of a proposal are worth their time, by t(k) and the chance of each."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import RoundPlan, cut
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget

# A draft token is the likeliest of several, so on average its chance is overestimated a little (the
# winner's curse). What another value does: benchmarks/simulate.py.
_CAUTION = 1.2


def plan_rows(
    tree: TokenTree, reach: list[float], limits: Budget, costs: RowCosts, token_s: float
) -> RoundPlan | None:
    """Plans the number of likeliest rows that is worth most; None where that is none.

    reach: of each row, the chance that it and all above it are right. token_s: what a token takes
    at the rate that the time could be spent at otherwise.
    """
    if len(tree) == 1:
        return None
    if tree.draft_probs or not (tree.is_chain or limits.branches):
        # Whether a sampled row is kept must not depend on what comes after it, which depends on
        # its token: a bound that is the same for all rows is blind to that.
        return cut(tree, limits, costs.slope / token_s)
    if not tree.is_chain:
        reach = [1.0, *sorted(reach[1:], reverse=True)]
    num_rows = _best_rows(reach[: limits.num_rows], costs, token_s)
    if tree.is_chain and not tree.required:  # most rounds
        if num_rows == 1:
            return None
        return RoundPlan(tree.first_rows(num_rows), None, values=tuple(reach[:num_rows]))
    return cut(tree, limits, reach[num_rows - 1] if num_rows > 1 else 1.0)


def _best_rows(reach: Sequence[float], costs: RowCosts, token_s: float) -> int:
    """Looks at every number of rows: steps in t(k) are real, and a fourth may be cheaper than a
    third."""
    best, most, tokens = 1, 0.0, -1.0
    rate = _CAUTION / token_s
    for row, more_s in enumerate(costs.further(len(reach))):
        tokens += reach[row]
        won = tokens - rate * more_s
        if won > most:
            best, most = row + 1, won
    return best
