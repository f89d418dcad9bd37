"""Drafts with Medusa heads (Cai et al. 2024), which each predict one token further ahead, all from
the state in which the target chose the pending token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from edge_spec.core.heads import HeadBackend, HeadMatrix, HeadScores, MedusaHead, MedusaStep
from edge_spec.drafters.heads.drafting import HeadDrafter, RowScores, head_scores, rows_of
from edge_spec.drafters.heads.features import LastState
from edge_spec.drafters.heads.layers import FloatProducts, HeadNetwork, logistic
from edge_spec.drafters.protocol import TRAITS


class MedusaNetwork(HeadNetwork):
    """backend: what computes its step; by default numpy does, in float32."""

    kind = MedusaHead.drafted_by

    def __init__(self, head: MedusaHead, backend: HeadBackend | None = None) -> None:
        super().__init__(head.vocab_size, head.token_ids)
        self.num_heads = head.num_heads
        self.shares_output = len(head.outputs) == 1
        matrices = _matrices(head)
        self.step: MedusaStep = (
            MedusaFormulas(head, FloatProducts(matrices))
            if backend is None
            else backend.medusa_step(head, matrices)
        )


class MedusaFormulas:
    """W (z + SiLU(A z + b)) for each head's A and b, and its own W or one that all share: drafts
    where there is no backend, whose steps are compared with it."""

    def __init__(self, head: MedusaHead, products: FloatProducts) -> None:
        self._num_blocks = [len(blocks) for blocks in head.blocks]
        self._shares_output = len(head.outputs) == 1
        self._products = products

    def __call__(self, state: np.ndarray, heads: Sequence[int]) -> HeadScores:
        """See MedusaStep."""
        states = np.concatenate([self._after_blocks(state[None], head) for head in heads])
        if self._shares_output:  # in one go: its weights are read once
            return head_scores(self._products("output.0", states))
        rows = zip(heads, states, strict=True)
        each = [self._products(f"output.{head}", z[None]) for head, z in rows]
        return head_scores(np.concatenate(each))

    def _after_blocks(self, state: np.ndarray, head: int) -> np.ndarray:
        """state: [1, hidden_size]"""
        for block in range(self._num_blocks[head]):
            inner = self._products(f"{head}.{block}", state)
            state = state + inner * logistic(inner)
        return state


def _matrices(head: MedusaHead) -> dict[str, HeadMatrix]:
    found = {
        f"{index}.{block}": HeadMatrix((partial(np.asarray, weight),), bias)
        for index, blocks in enumerate(head.blocks)
        for block, (weight, bias) in enumerate(blocks)
    }
    return found | {f"output.{index}": each for index, each in enumerate(head.outputs)}


class MedusaDrafter(HeadDrafter):
    """Drafts nothing in an answer's first round, before which no state is known."""

    traits = TRAITS["medusa"]
    _target: LastState

    def __init__(self, network: MedusaNetwork) -> None:
        super().__init__(network, LastState(), network.num_heads, network.shares_output)
        self._network = network

    def _score_heads(self, heads: Sequence[int]) -> list[RowScores]:
        assert self._target.state is not None
        return rows_of(self._network.step(self._target.state, heads), self._network.token_ids)
