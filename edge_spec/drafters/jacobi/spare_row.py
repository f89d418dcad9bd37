"""Fills the row that a plain step takes anyway, where passes are padded to widths whose rows agree
and no other drafter knows a token.

What the target says after a wrong token is drafted for what follows the right one: Jacobi iteration
over a block of one (Santilli et al. 2023). One that is wrong again makes the next one, so that the
row is never idle. It is right one time in twelve.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.protocol import Budget, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import Growth, nothing

_SEEDED, _ITERATED = range(2)  # how it came about
_PRIORS = (0.01, 0.09)  # measured over greedy texts of a 135M chat model


class SpareRowDrafter(Drafter):
    """Proposes one token where the second row is free, else nothing."""

    name = "spare-row"
    traits = DrafterTraits()

    def __init__(self) -> None:
        self._known: int | None = None  # what may follow the pending token
        self._acceptance = LearntAcceptance(_PRIORS)
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        self._known = None
        self._growth = nothing(prompt[-1])
        self._acceptance.begin_text()

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if budget.free_rows < 2 or min(budget.num_draft_tokens, budget.num_rows - 1) < 1:
            self._growth = nothing(pending)
            return self._growth.tree
        # Without one any token does: what the target says after it is the next one.
        kind, token = _ITERATED, self._known
        if token is None:
            kind, token = _SEEDED, pending
        chain = TokenTree.chain(pending, [token], [self._acceptance.estimate(kind)], self.name)
        self._growth = Growth(chain, (0, kind))
        return chain

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        wrong = len(verdict.accepted_rows) + 1  # of a chain
        known = tree.is_chain and wrong < len(tree)
        self._known = int(out.logits[wrong].argmax()) if known else None
