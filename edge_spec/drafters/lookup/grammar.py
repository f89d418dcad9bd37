"""Drafts what a grammar spells out: keys of a JSON object, its braces and quotes."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.protocol import Budget, Drafter

# The text is certain, its tokens are not: a target may write the same letters in other pieces.
_CONFIDENCE = 0.95


class ForcedDrafter(Drafter):
    """Proposes a chain where the answer's constraint leaves one text only, else nothing."""

    name = "grammar"

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        constraint = self._sampler.constraint if self._sampler is not None else None
        tokens = [] if constraint is None else constraint.forced()[: budget.num_draft_tokens]
        return TokenTree.chain(pending, tokens, [_CONFIDENCE] * len(tokens), self.name)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        pass
