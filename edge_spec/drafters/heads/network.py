"""The arithmetic of an EAGLE head: the formulas as they are published, one line each. Products with
its matrices are left to `core.heads.Products`, all else is float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from edge_spec.core.heads import EagleHead, HeadMatrix, OpensProducts, TargetTables
from edge_spec.drafters.heads.float_products import FloatProducts
from edge_spec.drafters.heads.layers import (
    FEW_ROWS,
    HeadLayers,
    Heads,
    layer_matrices,
    own_matrix,
    targets_output,
)

_KEPT_ROWS = 2048  # of an embedding: 32 MB of the widest heads


class EagleNetwork:
    """Weights and formulas; it keeps no text. tables: the target's. opens: what multiplies with
    the head's matrices; by default numpy does, in float32."""

    kind = EagleHead.drafted_by

    def __init__(
        self, head: EagleHead, tables: TargetTables, opens: OpensProducts = FloatProducts
    ) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self.window = head.window
        self._head = head
        self._products = opens(eagle_matrices(head, tables))
        self._embed = head.embed_rows or tables.embed
        self._embedded = lru_cache(_KEPT_ROWS)(lambda token: self._embed(np.array([token])))
        self._layers = HeadLayers(head.config, self._products, head.tensors)

    @property
    def features_size(self) -> int:
        """Of all features of a token beside each other."""
        return len(self.feature_layers) * self._head.feature_size

    def entered(self, found: np.ndarray) -> np.ndarray:
        """found: [rows, features_size] -> [rows, hidden_size], what a token's features enter as."""
        if self._head.joins_embedding:
            return found
        parts = [
            self._layers.normed(each, f"feature_norm.{index}")
            for index, each in enumerate(np.split(found, len(self.feature_layers), axis=1))
        ]
        return self._products("fc", self._layers.normed(np.concatenate(parts, axis=1), "fc_norm"))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """[rows, hidden_size]. Few tokens are mostly those of a moment ago: they are remembered."""
        if len(tokens) > FEW_ROWS:
            return self._embed(tokens)
        return np.concatenate([self._embedded(token) for token in tokens.tolist()])

    def enter(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the first layer adds to, [rows, hidden_size], and what its attention reads."""
        embedded = self.embed(tokens)
        if self._head.joins_embedding:
            embedded = self._layers.normed(embedded, "embed_norm")
            features = self._layers.normed(features, "state_norm")
            stream = self._products("fc", np.concatenate([embedded, features], axis=1))
            return stream, self._layers.normed(stream, "layers.0.input_norm")
        normed = self._layers.normed(features, "layers.0.hidden_norm")
        beside = [self._layers.normed(embedded, "layers.0.input_norm"), normed]
        return normed if self._head.adds_to_normed else features, np.concatenate(beside, axis=1)

    def read(self, stream: np.ndarray, layer: int) -> np.ndarray:
        """What the attention of a later layer reads."""
        return self._layers.normed(stream, f"layers.{layer}.input_norm")

    def heads(self, read: np.ndarray, layer: int, positions: np.ndarray) -> Heads:
        return self._layers.heads(read, layer, positions)

    def leave(self, stream: np.ndarray, mixed: np.ndarray, layer: int) -> np.ndarray:
        """See HeadLayers."""
        return self._layers.leave(stream, mixed, layer)

    def goes_on_from(self, stream: np.ndarray) -> np.ndarray:
        """What takes the place of features [rows, hidden_size] that the target has not computed."""
        return self._layers.normed(stream, "norm") if self._head.returns_normed else stream

    def logits(self, stream: np.ndarray) -> np.ndarray:
        """[rows, vocab of the target] float32; tokens that it does not score have -inf."""
        scores = self._products("head", self._layers.normed(stream, "norm"))
        if self._head.token_ids is None:
            return scores
        spread = np.full((len(stream), self.config.vocab_size), -np.inf, np.float32)
        spread[:, self._head.token_ids] = scores
        return spread


def eagle_matrices(head: EagleHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """What a head multiplies with; matrices that read the same are one."""
    matrices = {"fc": own_matrix(head.tensors, ["fc"])}
    for layer in range(head.config.num_layers):
        matrices |= layer_matrices(head.tensors, f"layers.{layer}.")
    if "head" in head.tensors:
        parts: tuple[Callable[[], np.ndarray], ...] = (partial(head.tensors.__getitem__, "head"),)
        return matrices | {"head": HeadMatrix(parts, is_output=True)}
    return matrices | {"head": targets_output(tables, head.token_ids, head.config.vocab_size)}
