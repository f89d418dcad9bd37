"""The arithmetic of a DFlash head: a block of mask tokens after the pending one, read in one pass
beside what the target has computed of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.heads import DFlashHead, HeadBackend, TargetTables
from edge_spec.drafters.heads.float_products import NumpyBackend
from edge_spec.drafters.heads.layers import (
    HeadLayers,
    attend,
    layer_matrices,
    own_matrix,
    targets_output,
)
from edge_spec.drafters.heads.medusa import Likeliest


class DFlashNetwork:
    """Weights and formulas; it keeps no text. tables: the target's. backend: what multiplies
    with the head's matrices; by default numpy does, in float32."""

    kind = DFlashHead.drafted_by
    reported_acceptance: Sequence[float] = ()  # see Drafter
    shares_output = True  # all rows are scored at once

    def __init__(
        self, head: DFlashHead, tables: TargetTables, backend: HeadBackend | None = None
    ) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self.features_size = len(head.feature_layers) * head.feature_size
        self.num_heads = head.block_size - 1  # rows that draft
        matrices = {"fc": own_matrix(head.tensors, ["fc"])}
        for layer in range(head.config.num_layers):
            matrices |= layer_matrices(head.tensors, f"layers.{layer}.")
        matrices["head"] = targets_output(tables, None, head.config.vocab_size)
        self._products = (backend or NumpyBackend()).products(matrices)
        self._layers = HeadLayers(head.config, self._products, head.tensors)
        self._embed = tables.embed
        self._masks = tables.embed(np.full(self.num_heads, head.mask_token))

    def entries(self, found: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """found: [rows, features_size] of tokens of the text -> their keys and values in each
        layer, [layers, 2, heads, rows, head_dim]."""
        context = self._layers.normed(self._products("fc", found), "context_norm")
        layers = range(self.config.num_layers)
        return np.stack([self._layers.keys_values(context, i, positions) for i in layers])

    def block(self, pending: int, position: int, entries: np.ndarray) -> np.ndarray:
        """[block_size - 1, hidden_size]: the states after the final norm in which the tokens after
        the pending one are drafted. position: of the pending token; entries: of the text before."""
        stream = np.concatenate([self._embed(np.array([pending])), self._masks])
        positions = position + np.arange(len(stream))
        for layer, (keys, values) in enumerate(entries):
            read = self._layers.normed(stream, f"layers.{layer}.input_norm")
            made = self._layers.heads(read, layer, positions)
            keys = np.concatenate([keys, made.keys], axis=1)
            values = np.concatenate([values, made.values], axis=1)
            mixed = attend(made._replace(keys=keys, values=values), None)  # each row sees all rows
            stream = self._layers.leave(stream, mixed, layer)
        return self._layers.normed(stream[1:], "norm")

    def logits(self, state: np.ndarray, heads: Sequence[int]) -> np.ndarray:
        """[heads, vocab] float32. state: of a block; heads: rows after the pending token's."""
        return self._products("head", state[list(heads)])

    def likeliest(self, state: np.ndarray) -> Sequence[Likeliest]:
        """Nothing: products are all that its backend computes."""
        return ()
