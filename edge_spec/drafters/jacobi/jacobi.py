"""Jacobi decoding: draft a block, score it at once, and let the block's own argmax be the next
draft token (Santilli et al. 2023).

Each round verifies the block as a chain. What was right is committed; what the target would have
written at the other positions, given the draft tokens before them, becomes the next block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.jacobi.lookahead import Filler, JacobiInit
from edge_spec.drafters.protocol import Budget, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import Growth, nothing

DEFAULT_BLOCK = (
    3  # a block, still: on the measured CPU one draft token is faster (docs/benchmarks.md)
)
_SEEDED, _ITERATED = range(2)  # how it came about
_SPARE_PRIORS = (0.01, 0.09)  # measured over greedy texts of a 135M chat model


class _Drafted(IntEnum):
    """Says how a draft token came about."""

    FILLED = 0
    REFINED = 1  # by an argmax that changed it
    STABLE = 2  # by an argmax that left it as it was


# By how a draft token came about: as the first of its block, and below a right one. Measured over
# greedy texts of a 135M chat model.
_PRIORS = ((0.22, 0.50), (0.05, 0.10), (0.08, 0.08))


class JacobiDrafter(Drafter):
    """block: draft tokens a round, fewer where the budget says so."""

    name = "jacobi"
    traits = DrafterTraits(options=frozenset({"jacobi"}))

    def __init__(
        self, fill: JacobiInit = JacobiInit.NGRAM, block: int = DEFAULT_BLOCK, seed: int = 0
    ) -> None:
        self._block = block
        self._filler = Filler(fill, seed)
        self._draft_tokens: list[
            tuple[int, _Drafted]
        ] = []  # from the position after the pending token
        self._acceptance = LearntAcceptance([prior for pair in _PRIORS for prior in pair])
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        self._draft_tokens = []
        self._growth = nothing(prompt[-1])
        self._filler.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        count = min(self._block, budget.num_draft_tokens, budget.num_rows - 1)
        if count <= 0:
            return TokenTree.chain(pending)
        known = [token for token, _ in self._draft_tokens]
        filled = self._filler.fill(known, count - len(known)) if count > len(known) else []
        self._draft_tokens += [(token, _Drafted.FILLED) for token in filled]
        kinds = [0, *(2 * made + (i > 0) for i, (_, made) in enumerate(self._draft_tokens[:count]))]
        chain = TokenTree.chain(
            pending,
            [token for token, _ in self._draft_tokens[:count]],
            [self._acceptance.estimate(kind) for kind in kinds[1:]],
            self.name,
            required=True,
        )
        self._growth = Growth(chain, kinds)
        return chain

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._filler.extend(verdict.tokens)
        refined: list[tuple[int, _Drafted]] = []  # for the position after each scored draft token
        row = 0
        for i, (token, _) in enumerate(self._draft_tokens):
            scored = tree.child(row, token)
            if scored is None:
                break
            row = scored
            argmax = int(out.logits[row].argmax())
            same = i + 1 < len(self._draft_tokens) and self._draft_tokens[i + 1][0] == argmax
            refined.append((argmax, _Drafted.STABLE if same else _Drafted.REFINED))
        # The draft token at position i is refined by the row of draft token i - 1.
        updated = [*self._draft_tokens[:1], *refined, *self._draft_tokens[len(refined) + 1 :]]
        self._draft_tokens = updated[len(verdict.tokens) :]

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"acceptance": self._acceptance.snapshot()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self._acceptance.restore(state["acceptance"])


class SpareRowDrafter(Drafter):
    """Proposes one token where the second row is free, else nothing: passes are padded to widths
    whose rows agree, so a plain step may take that row anyway.

    What the target says after a wrong token is drafted for what follows the right one: Jacobi
    iteration over a block of one. One that is wrong again makes the next one, so that the row is
    never idle. It is right one time in twelve.
    """

    name = "spare-row"
    traits = DrafterTraits()

    def __init__(self) -> None:
        self._known: int | None = None  # what may follow the pending token
        self._acceptance = LearntAcceptance(_SPARE_PRIORS)
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
