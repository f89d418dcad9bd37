"""Drafts with Medusa heads (Cai et al. 2024): each predicts one token further ahead, from the state
in which the target chose the pending token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from edge_spec.core.heads import HeadBackend, HeadMatrix, MedusaHead, MedusaStep
from edge_spec.drafters.heads.drafting import HeadDrafter, RowScores, rows_of
from edge_spec.drafters.heads.features import LastState
from edge_spec.drafters.heads.layers import HeadNetwork
from edge_spec.drafters.protocol import TRAITS


class MedusaNetwork(HeadNetwork):
    kind = MedusaHead.drafted_by

    def __init__(self, head: MedusaHead, backend: HeadBackend) -> None:
        super().__init__(head.vocab_size, head.token_ids)
        self.num_heads = head.num_heads
        self.shares_output = len(head.outputs) == 1
        self.step: MedusaStep = backend(head, _matrices(head))


def _matrices(head: MedusaHead) -> dict[str, HeadMatrix]:
    found = {
        f"{index}.{block}": HeadMatrix((partial(np.asarray, weight),), bias)
        for index, blocks in enumerate(head.blocks)
        for block, (weight, bias) in enumerate(blocks)
    }
    return found | {f"output.{index}": each for index, each in enumerate(head.outputs)}


class MedusaDrafter(HeadDrafter):
    """Drafts nothing in an answer's first round, when no state is known yet."""

    traits = TRAITS["medusa"]
    _target: LastState

    def __init__(self, network: MedusaNetwork) -> None:
        super().__init__(network, LastState(), network.num_heads, network.shares_output)
        self._network = network

    def _score_heads(self, heads: Sequence[int]) -> list[RowScores]:
        assert self._target.state is not None
        return rows_of(self._network.step(self._target.state, heads), self._network.token_ids)
