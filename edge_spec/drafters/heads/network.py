"""The arithmetic of an EAGLE head in float32: the formulas as they are published, one line each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edge_spec.core.heads import EagleHead, TargetTables
from edge_spec.core.rope import Rope


class Heads(NamedTuple):
    """[heads, rows, head_dim] each; groups of queries share keys."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class EagleNetwork:
    """Weights and formulas; it keeps no text. tables: the target's."""

    kind = EagleHead.drafted_by

    def __init__(self, head: EagleHead, tables: TargetTables) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self._head = head
        self._tensors = head.tensors
        self._tables = tables
        self._output = (
            head.tensors["head"] if "head" in head.tensors else tables.output_rows(head.token_ids)
        )
        scaling = head.config.rope_scaling
        self._frequencies = Rope(head.config.rope_theta, scaling).frequencies(head.config.head_dim)
        self._magnitude = 1.0 if scaling is None else scaling.magnitude

    @property
    def features_size(self) -> int:
        """Of all features of a token beside each other."""
        return len(self.feature_layers) * self._head.feature_size

    def entered(self, found: np.ndarray) -> np.ndarray:
        """found: [rows, features_size] -> [rows, hidden_size], what a token's features enter as."""
        if self._head.joins_embedding:
            return found
        parts = [
            self._normed(each, f"feature_norm.{index}")
            for index, each in enumerate(np.split(found, len(self.feature_layers), axis=1))
        ]
        return self._linear(self._normed(np.concatenate(parts, axis=1), "fc_norm"), "fc")

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        own = self._tensors.get("embed")
        return self._tables.embed(tokens) if own is None else own[tokens]

    def enter(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the first layer adds to, [rows, hidden_size], and what its attention reads."""
        embedded = self.embed(tokens)
        if self._head.joins_embedding:
            stream = self._linear(np.concatenate([embedded, features], axis=1), "fc")
            return stream, self._normed(stream, "layers.0.input_norm")
        normed = self._normed(features, "layers.0.hidden_norm")
        beside = [self._normed(embedded, "layers.0.input_norm"), normed]
        return normed if self._head.adds_to_normed else features, np.concatenate(beside, axis=1)

    def read(self, stream: np.ndarray, layer: int) -> np.ndarray:
        """What the attention of a later layer reads."""
        return self._normed(stream, f"layers.{layer}.input_norm")

    def heads(self, read: np.ndarray, layer: int, positions: np.ndarray) -> Heads:
        config, prefix = self.config, f"layers.{layer}."

        def split(name: str, count: int) -> np.ndarray:
            rows = self._linear(read, prefix + name).reshape(len(read), count, config.head_dim)
            rows = self._normed(rows, f"{prefix}{name}_norm").swapaxes(0, 1)
            return rows if name == "v" else self._turned(rows, positions)

        keys, values = (split(name, config.num_kv_heads) for name in "kv")
        return Heads(split("q", config.num_heads), keys, values)

    def leave(self, stream: np.ndarray, mixed: np.ndarray, layer: int) -> np.ndarray:
        """The stream after a layer whose attention has mixed [query heads, rows, head_dim]."""
        prefix = f"layers.{layer}."
        beside = mixed.swapaxes(0, 1).reshape(len(stream), -1)
        stream = stream + self._linear(beside, prefix + "o")
        read = self._normed(stream, prefix + "post_norm")
        gate = self._linear(read, prefix + "gate")
        gate = gate / (1 + np.exp(-np.clip(gate, -80, None)))
        updated: np.ndarray = stream + self._linear(
            gate * self._linear(read, prefix + "up"), prefix + "down"
        )
        return updated

    def goes_on_from(self, stream: np.ndarray) -> np.ndarray:
        """What takes the place of features [rows, hidden_size] that the target has not computed."""
        return self._normed(stream, "norm") if self._head.returns_normed else stream

    def logits(self, stream: np.ndarray) -> np.ndarray:
        """[rows, vocab of the target] float32; tokens that it does not score have -inf."""
        scores: np.ndarray = self._normed(stream, "norm") @ self._output.T
        if self._head.token_ids is None:
            return scores
        spread = np.full((len(stream), self.config.vocab_size), -np.inf, np.float32)
        spread[:, self._head.token_ids] = scores
        return spread

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y: np.ndarray = x @ self._tensors[name + ".weight"].T
        bias = self._tensors.get(name + ".bias")
        return y if bias is None else y + bias

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        """Root mean square normalization, or nothing where the head has no such norm."""
        weight = self._tensors.get(name)
        if weight is None:
            return x
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_epsilon)
        normed: np.ndarray = x * scale.astype(np.float32) * weight
        return normed

    def _turned(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x: [heads, rows, head_dim], halves paired (Su et al. 2021)."""
        angles = positions[:, None] * self._frequencies[None]
        cos = (np.cos(angles) * self._magnitude).astype(np.float32)
        sin = (np.sin(angles) * self._magnitude).astype(np.float32)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(heads: Heads, sees: np.ndarray) -> np.ndarray:
    """Softmax attention; sees: [rows, keys] bool, at least one key a row. Returns [query heads,
    rows, head_dim]."""
    queries, keys, values = heads
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    scores = grouped @ keys[:, None].swapaxes(-1, -2) / np.float32(np.sqrt(queries.shape[-1]))
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = (weights @ values[:, None]).reshape(queries.shape)
    return mixed
