"""The arithmetic of a DFlash head: a block of mask tokens after the pending one, read in one pass
beside what the target has computed of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.heads import (
    BindsBlocks,
    BlockRows,
    BlockStep,
    DFlashHead,
    HeadBackend,
    HeadScores,
    TargetTables,
)
from edge_spec.drafters.heads.float_products import FloatProducts
from edge_spec.drafters.heads.independent import head_scores
from edge_spec.drafters.heads.layers import (
    HeadLayers,
    attend,
    layer_matrices,
    own_matrix,
    targets_output,
)


class DFlashNetwork:
    """A head's weights, and what computes with them; it keeps no text. tables: the target's.
    backend: what computes its steps; by default numpy does, in float32."""

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
        self._step: BindsBlocks = (
            DFlashFormulas(head, FloatProducts(matrices))
            if backend is None
            else backend.dflash_step(head, matrices)
        )
        self._embed = tables.embed
        self._masks = tables.embed(np.full(self.num_heads, head.mask_token))

    def bound_to(self, cache: np.ndarray) -> BlockStep:
        """See BindsBlocks."""
        return self._step.bound_to(cache)

    def embedded(self, pending: int) -> np.ndarray:
        """[block_size, hidden_size] of the block after this token."""
        return np.concatenate([self._embed(np.array([pending])), self._masks])

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """See IndependentHeads: it scores all tokens."""
        return scores


class DFlashFormulas:
    """Drafts where there is no backend; the steps of backends are compared with it."""

    def __init__(self, head: DFlashHead, products: FloatProducts) -> None:
        self._num_layers = head.config.num_layers
        self._products = products
        self._layers = HeadLayers(head.config, products, head.tensors)

    def bound_to(self, cache: np.ndarray) -> BlockStep:
        """See BindsBlocks."""
        return lambda rows: self._scores(rows, cache)

    def _scores(self, rows: BlockRows, cache: np.ndarray) -> HeadScores:
        """See BlockStep."""
        layers, known = self._layers, len(rows.found)
        context = layers.normed(self._products("fc", rows.found), "context_norm")
        at = rows.position + np.arange(known)
        end, stream = rows.start + known, rows.embedded
        positions = rows.position + known + np.arange(len(stream))
        first = max(end - rows.num_seen, 0)
        for layer in range(self._num_layers):
            cache[layer, :, :, rows.start : end] = layers.keys_values(context, layer, at)
            read = layers.normed(stream, f"layers.{layer}.input_norm")
            made = layers.heads(read, layer, positions)
            seen_keys, seen_values = cache[layer, :, :, first:end]
            keys = np.concatenate([seen_keys, made.keys], axis=1)
            values = np.concatenate([seen_values, made.values], axis=1)
            mixed = attend(made._replace(keys=keys, values=values), None)  # each row sees all rows
            stream = layers.leave(stream, mixed, layer)
        scored = layers.normed(stream[1 : 1 + rows.num_scored], "norm")
        return head_scores(self._products("head", scored))
