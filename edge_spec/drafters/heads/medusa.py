"""Drafts with Medusa heads (Cai et al. 2024): each predicts one token further ahead, all from the
state in which the target chose the pending token.

A head knows nothing of what the heads before it have drafted, so any of a head's tokens may follow
any of those before: the tree holds the likeliest paths, by the product of the heads' own chances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from edge_spec.core.heads import HeadBackend, HeadMatrix, MedusaHead
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.draft.ahead import Path
from edge_spec.drafters.draft.candidates import PRIORS, candidates_after, kinds_of, ranked
from edge_spec.drafters.heads.float_products import NumpyBackend
from edge_spec.drafters.protocol import Budget, Cost, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import Candidate, grow, nothing

Likeliest = tuple[np.ndarray, np.ndarray]  # tokens and their shares, in falling order


class MedusaNetwork:
    """The formula: W (z + SiLU(A z + b)) for each head's own A and b, and its own W or one that all
    share. backend: what computes with them; by default numpy does, in float32."""

    kind = MedusaHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter

    def __init__(self, head: MedusaHead, backend: HeadBackend | None = None) -> None:
        backend = backend or NumpyBackend()
        self.num_heads = head.num_heads
        self.shares_output = len(head.outputs) == 1
        self._vocab_size, self._token_ids = head.vocab_size, head.token_ids
        self._num_blocks = [len(blocks) for blocks in head.blocks]
        matrices = _matrices(head)
        self._step = backend.medusa_step(head, matrices)
        self._products = backend.products(matrices if self._step is None else {})

    def logits(self, state: np.ndarray, heads: Sequence[int]) -> np.ndarray:
        """[heads, vocab] float32, -inf for tokens that are not scored. state: [hidden_size] after
        the target's final norm."""
        scores = self._scores(state, heads)
        if self._token_ids is None:
            return scores
        spread = np.full((len(heads), self._vocab_size), -np.inf, np.float32)
        spread[:, self._token_ids] = scores
        return spread

    def likeliest(self, state: np.ndarray) -> Sequence[Likeliest]:
        """Of each head, the target's ids and their shares of e to the logits; nothing where only
        logits are known."""
        if self._step is None:
            return ()
        told = self._step(state)
        tokens = told.likeliest if self._token_ids is None else self._token_ids[told.likeliest]
        return list(zip(tokens, told.shares, strict=True))

    def _scores(self, state: np.ndarray, heads: Sequence[int]) -> np.ndarray:
        """[heads, scored tokens]"""
        if self._step is not None:
            return self._step(state).logits[list(heads)]
        states = np.concatenate([self._after_blocks(state[None], head) for head in heads])
        if self.shares_output:  # in one go: its weights are read once
            return self._products("output.0", states)
        rows = zip(heads, states, strict=True)
        return np.concatenate([self._products(f"output.{i}", z[None]) for i, z in rows])

    def _after_blocks(self, state: np.ndarray, head: int) -> np.ndarray:
        """state: [1, hidden_size]"""
        for block in range(self._num_blocks[head]):
            inner = self._products(f"{head}.{block}", state)
            state = state + inner / (1 + np.exp(-np.clip(inner, -80, None)))
        return state


def _matrices(head: MedusaHead) -> dict[str, HeadMatrix]:
    found = {
        f"{index}.{block}": HeadMatrix((partial(np.asarray, weight),), bias)
        for index, blocks in enumerate(head.blocks)
        for block, (weight, bias) in enumerate(blocks)
    }
    return found | {
        f"output.{index}": HeadMatrix((read,), is_output=True)
        for index, read in enumerate(head.outputs)
    }


class IndependentHeads(Protocol):
    """Heads whose draft tokens are independent of each other."""

    @property
    def num_heads(self) -> int:
        """Tokens that they draft at most, one after the other."""

    @property
    def shares_output(self) -> bool:
        """Whether those of all heads are scored in one go."""

    @property
    def reported_acceptance(self) -> Sequence[float]:
        """See Drafter."""

    def logits(self, state: np.ndarray, heads: Sequence[int]) -> np.ndarray:
        """[heads, vocab] float32, of what the target has last told."""

    def likeliest(self, state: np.ndarray) -> Sequence[Likeliest]:
        """Of each head, tokens and their shares of e to the logits; nothing where only logits are
        known."""


class MedusaDrafter(Drafter):
    """Drafts nothing in an answer's first round, before which no state was told."""

    traits = DrafterTraits(trees=True, cost=Cost.PASS, hidden_states=True, head="medusa")

    def __init__(self, network: IndependentHeads, name: str = "medusa") -> None:
        self.name = name
        self._network = network
        self._acceptance = LearntAcceptance(PRIORS)
        self._growth = nothing(0)
        self._state: np.ndarray | None = None
        self._count = 0  # of draft tokens, at most
        self._logits: dict[int, np.ndarray] = {}  # by head, of this round
        self._likeliest: dict[int, list[tuple[int, int]]] = {}
        self._sampler = Sampler(SamplingParams(), ())

    @property
    def reported_acceptance(self) -> Sequence[float]:
        return self._network.reported_acceptance

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, prompt: Sequence[int]) -> None:
        self._state = None
        self._growth = nothing(prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._likeliest, self._logits = {}, {}
        self._count = budget.num_draft_tokens
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
        if not self._likeliest and self._sampler.prefers_by_logits:
            assert self._state is not None
            told = self._network.likeliest(self._state)
            self._likeliest = {i: kinds_of(*each) for i, each in enumerate(told)}
        if index not in self._likeliest:
            self._likeliest[index] = ranked(self._weigh(self._scores(index)))
        return candidates_after(path, self._likeliest[index])

    def _scores(self, index: int) -> np.ndarray:
        """[vocab] logits of a head; of all heads at once, where that costs little more."""
        if index not in self._logits:
            assert self._state is not None
            network = self._network
            all_heads = range(max(index + 1, min(network.num_heads, self._count)))
            heads = all_heads if network.shares_output else [index]
            self._logits |= zip(heads, network.logits(self._state, heads), strict=True)
        return self._logits[index]

    def _weigh(self, logits: np.ndarray) -> np.ndarray:
        """[vocab] what the target would prefer by such logits, whatever was drafted before."""
        sampler = self._sampler
        return (sampler.probs if sampler.sampled_drafts else sampler.preference)(logits, ())
