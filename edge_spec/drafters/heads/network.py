"""The arithmetic of an EAGLE head: the formulas as they are published, one line each. Products with
its matrices are left to `core.heads.Products`, all else is float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from edge_spec.core.heads import EagleHead, HeadMatrix, OpensProducts, TargetTables
from edge_spec.core.rope import Rope
from edge_spec.drafters.heads.blas_threads import one_blas_thread
from edge_spec.drafters.heads.float_products import FloatProducts

_FEW_TOKENS = 16
_KEPT_ROWS = 2048  # of an embedding: 32 MB of the widest heads
_SHORT = 512  # keys, up to which numpy takes one thread by itself
_ROWS_AT_ONCE = 16384  # of an output matrix, which are read in float32


class Heads(NamedTuple):
    """[heads, rows, head_dim] each; groups of queries share keys."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class EagleNetwork:
    """Weights and formulas; it keeps no text. tables: the target's. opens: what multiplies with
    the head's matrices; by default numpy does, in float32."""

    kind = EagleHead.drafted_by

    def __init__(
        self, head: EagleHead, tables: TargetTables, opens: OpensProducts = FloatProducts
    ) -> None:
        self.config = head.config
        self.feature_layers = head.feature_layers
        self._head = head
        self._products = opens(eagle_matrices(head, tables))
        self._embed = head.embed_rows or tables.embed
        self._embedded = lru_cache(_KEPT_ROWS)(lambda token: self._embed(np.array([token])))
        self._norms = {name: head.tensors[name] for name in head.tensors if "norm" in name}
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
        return self._products("fc", self._normed(np.concatenate(parts, axis=1), "fc_norm"))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """[rows, hidden_size]. Few tokens are mostly those of a moment ago: they are remembered."""
        if len(tokens) > _FEW_TOKENS:
            return self._embed(tokens)
        return np.concatenate([self._embedded(token) for token in tokens.tolist()])

    def enter(self, tokens: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the first layer adds to, [rows, hidden_size], and what its attention reads."""
        embedded = self.embed(tokens)
        if self._head.joins_embedding:
            stream = self._products("fc", np.concatenate([embedded, features], axis=1))
            return stream, self._normed(stream, "layers.0.input_norm")
        normed = self._normed(features, "layers.0.hidden_norm")
        beside = [self._normed(embedded, "layers.0.input_norm"), normed]
        return normed if self._head.adds_to_normed else features, np.concatenate(beside, axis=1)

    def read(self, stream: np.ndarray, layer: int) -> np.ndarray:
        """What the attention of a later layer reads."""
        return self._normed(stream, f"layers.{layer}.input_norm")

    def heads(self, read: np.ndarray, layer: int, positions: np.ndarray) -> Heads:
        config, prefix = self.config, f"layers.{layer}."
        all_heads = self._products(prefix + "qkv", read).reshape(len(read), -1, config.head_dim)
        ends = [config.num_heads, config.num_heads + config.num_kv_heads]
        queries, keys, values = np.split(all_heads.swapaxes(0, 1), ends)
        queries, keys = (
            self._normed(queries, prefix + "q_norm"),
            self._normed(keys, prefix + "k_norm"),
        )
        turned = self._turned(np.concatenate([queries, keys]), positions)
        return Heads(turned[: ends[0]], turned[ends[0] :], values)

    def leave(self, stream: np.ndarray, mixed: np.ndarray, layer: int) -> np.ndarray:
        """The stream after a layer whose attention has mixed [query heads, rows, head_dim]."""
        prefix = f"layers.{layer}."
        beside = mixed.swapaxes(0, 1).reshape(len(stream), -1)
        stream = stream + self._products(prefix + "o", beside)
        read = self._normed(stream, prefix + "post_norm")
        gate, up = np.split(self._products(prefix + "gate_up", read), 2, axis=1)
        gated = gate / (1 + np.exp(-np.clip(gate, -80, None))) * up
        updated: np.ndarray = stream + self._products(prefix + "down", gated)
        return updated

    def goes_on_from(self, stream: np.ndarray) -> np.ndarray:
        """What takes the place of features [rows, hidden_size] that the target has not computed."""
        return self._normed(stream, "norm") if self._head.returns_normed else stream

    def logits(self, stream: np.ndarray) -> np.ndarray:
        """[rows, vocab of the target] float32; tokens that it does not score have -inf."""
        scores = self._products("head", self._normed(stream, "norm"))
        if self._head.token_ids is None:
            return scores
        spread = np.full((len(stream), self.config.vocab_size), -np.inf, np.float32)
        spread[:, self._head.token_ids] = scores
        return spread

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        """Root mean square normalization, or nothing where the head has no such norm."""
        weight = self._norms.get(name)
        return x if weight is None else rms_normed(x, weight, self.config.norm_epsilon)

    def _turned(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x: [heads, rows, head_dim], halves paired (Su et al. 2021)."""
        angles = positions[:, None] * self._frequencies[None]
        cos = (np.cos(angles) * self._magnitude).astype(np.float32)
        sin = (np.sin(angles) * self._magnitude).astype(np.float32)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def eagle_matrices(head: EagleHead, tables: TargetTables) -> dict[str, HeadMatrix]:
    """What a head multiplies with; matrices that read the same are one."""
    matrices = {"fc": own_matrix(head.tensors, ["fc"])}
    for layer in range(head.config.num_layers):
        matrices |= layer_matrices(head.tensors, f"layers.{layer}.")
    if "head" in head.tensors:
        parts: tuple[Callable[[], np.ndarray], ...] = (partial(head.tensors.__getitem__, "head"),)
        return matrices | {"head": HeadMatrix(parts, is_output=True)}
    return matrices | {"head": targets_output(tables, head.token_ids, head.config.vocab_size)}


def layer_matrices(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, HeadMatrix]:
    joined = {"qkv": "qkv", "o": "o", "gate_up": ("gate", "up"), "down": ("down",)}
    return {
        prefix + name: own_matrix(tensors, [prefix + each for each in parts])
        for name, parts in joined.items()
    }


def own_matrix(tensors: Mapping[str, np.ndarray], names: list[str]) -> HeadMatrix:
    """Of the head's tensors, whose rows follow each other."""
    parts = tuple(partial(tensors.__getitem__, name + ".weight") for name in names)
    biases = [tensors[name + ".bias"] for name in names if name + ".bias" in tensors]
    return HeadMatrix(parts, np.concatenate(biases) if biases else None)


def targets_output(
    tables: TargetTables, token_ids: np.ndarray | None, vocab_size: int
) -> HeadMatrix:
    """The target's own, read in parts."""
    ids = np.arange(vocab_size) if token_ids is None else token_ids
    parts = [ids[start : start + _ROWS_AT_ONCE] for start in range(0, len(ids), _ROWS_AT_ONCE)]
    return HeadMatrix(tuple(partial(tables.output_rows, part) for part in parts), is_output=True)


def rms_normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    normed: np.ndarray = x * scale.astype(np.float32) * weight
    return normed


def attend(heads: Heads, sees: np.ndarray | None) -> np.ndarray:
    """Softmax attention; sees: [rows, keys] bool, at least one key a row; None: all. Returns
    [query heads, rows, head_dim]."""
    queries, keys, values = heads
    is_short = len(queries[0]) > _FEW_TOKENS or keys.shape[1] <= _SHORT
    with nullcontext() if is_short else one_blas_thread():
        return _attended(queries, keys, values, sees)


def _attended(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, sees: np.ndarray | None
) -> np.ndarray:
    scaled = queries * np.float32(1 / np.sqrt(queries.shape[-1]))
    grouped = scaled.reshape(len(keys), -1, *queries.shape[1:])
    scores = grouped @ keys[:, None].swapaxes(-1, -2)
    if sees is not None:
        scores = np.where(sees, scores, -np.inf)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = (weights @ values[:, None]).reshape(queries.shape)
    return mixed
