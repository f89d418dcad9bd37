"""Drafts with Medusa heads (Cai et al. 2024): each predicts one token further ahead, all from the
state in which the target chose the pending token.

A head knows nothing of what the heads before it have drafted, so any of a head's tokens may follow
any of those before: the tree holds the likeliest paths, by the product of the heads' own chances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.heads import MedusaHead
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.draft.ahead import Path
from edge_spec.drafters.draft.candidates import PRIORS, candidates_after, ranked
from edge_spec.drafters.protocol import Budget, Cost, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import Candidate, grow, nothing


class MedusaNetwork:
    """The formula: W (z + SiLU(A z + b)) for each head's own A, b and W."""

    kind = MedusaHead.drafted_by

    def __init__(self, head: MedusaHead) -> None:
        self.num_heads = head.num_heads
        self._head = head

    def logits(self, state: np.ndarray, index: int) -> np.ndarray:
        """[vocab] float32 of a head, -inf for tokens that it does not score. state: [hidden_size]
        after the target's final norm."""
        for weight, bias in self._head.blocks[index]:
            inner = weight @ state + bias
            state = state + inner / (1 + np.exp(-np.clip(inner, -80, None)))
        scores: np.ndarray = self._head.outputs[index] @ state
        if self._head.token_ids is None:
            return scores
        spread = np.full(self._head.vocab_size, -np.inf, np.float32)
        spread[self._head.token_ids] = scores
        return spread


class MedusaDrafter(Drafter):
    """Drafts nothing in an answer's first round, before which no state was told."""

    traits = DrafterTraits(cost=Cost.PASS, hidden_states=True, head="medusa")

    def __init__(self, network: MedusaNetwork, name: str = "medusa") -> None:
        self.name = name
        self._network = network
        self._acceptance = LearntAcceptance(PRIORS)
        self._growth = nothing(0)
        self._state: np.ndarray | None = None
        self._likeliest: dict[int, list[tuple[int, int]]] = {}  # by head, of this round
        self._sampler = Sampler(SamplingParams(), ())

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, prompt: Sequence[int]) -> None:
        self._state = None
        self._growth = nothing(prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._likeliest = {}
        root: Path = ()
        self._growth = nothing(pending)
        if self._state is not None and budget.num_draft_tokens > 0:
            self._growth = grow(self.name, pending, budget, self._acceptance, root, self._expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._state = None
        if out.hidden is not None and verdict.tokens:
            self._state = out.hidden[verdict.kept[-1]].copy()

    def stats(self) -> dict[str, np.ndarray]:
        return {self.name: self._acceptance.stats()}

    def load_stats(self, stats: Mapping[str, np.ndarray]) -> None:
        if self.name in stats:
            self._acceptance.load_stats(stats[self.name])

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        index = len(path)
        if index == self._network.num_heads:
            return []
        if index not in self._likeliest:
            assert self._state is not None
            logits = self._network.logits(self._state, index)
            self._likeliest[index] = ranked(self._weigh(logits))
        return candidates_after(path, self._likeliest[index])

    def _weigh(self, logits: np.ndarray) -> np.ndarray:
        """[vocab] what the target would prefer by such logits, whatever was drafted before."""
        sampler = self._sampler
        return (sampler.probs if sampler.sampled_drafts else sampler.preference)(logits, ())
