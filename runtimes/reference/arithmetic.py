"""Weights and arithmetic of the reference transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Tensors

MAX_ROWS = 512  # of a pass


class Heads(NamedTuple):
    """What attention takes, each [heads, rows, head_dim]; groups of queries share keys."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


# Of a layer, by its number: what attention makes of its heads, [query heads, rows, head_dim].
Attend = Callable[[int, Heads], np.ndarray]


class Arithmetic:
    """Computes in float32 with weights that are read when a layer is first used and then kept."""

    def __init__(self, tensors: Tensors, context_length: int | None = None) -> None:
        self.config = tensors.config
        if context_length is not None:
            shorter = min(context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        self._tensors = tensors
        self._weights: dict[str, np.ndarray] = {}
        self.cos, self.sin = self.config.rope_tables(self.config.context_length)

    def weight(self, name: str) -> np.ndarray:
        if name not in self._weights:
            self._weights[name] = self._tensors.float32(name)
        return self._weights[name]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """x: [rows, in] -> [rows, out]."""
        y: np.ndarray = x @ self.weight(name + ".weight").T
        has_bias = (self.config.output_bias and name.endswith("o_proj")) or (
            self.config.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj"))
        )
        return y + self.weight(name + ".bias") if has_bias else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Root mean square normalization over the last axis (Zhang and Sennrich 2019)."""
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_epsilon)
        normed: np.ndarray = x * scale.astype(np.float32) * self.weight(name + ".weight")
        return normed

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x: [heads, rows, head_dim], turned by its positions, halves paired (Su et al. 2021)."""
        cos, sin = self.cos[positions], self.sin[positions]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """tokens: [rows] -> [rows, hidden]."""
        embedded: np.ndarray = self.weight("model.embed_tokens.weight")[tokens]
        return embedded

    def layer(self, x: np.ndarray, layer: int, positions: np.ndarray, attend: Attend) -> np.ndarray:
        """The residual stream [rows, hidden] after a layer; positions: [rows]."""
        prefix = f"model.layers.{layer}."
        heads = self._heads(self.norm(x, prefix + "input_layernorm"), prefix, positions)
        mixed = attend(layer, heads).swapaxes(0, 1).reshape(len(x), -1)
        x = x + self.linear(mixed, prefix + "self_attn.o_proj")
        normed = self.norm(x, prefix + "post_attention_layernorm")
        gate = self.linear(normed, prefix + "mlp.gate_proj")
        up = self.linear(normed, prefix + "mlp.up_proj")
        # SwiGLU (Shazeer 2020); the clip keeps exp within float32.
        swish = gate / (1 + np.exp(-np.clip(gate, -80, None)))
        updated: np.ndarray = x + self.linear(swish * up, prefix + "mlp.down_proj")
        return updated

    def _heads(self, x: np.ndarray, prefix: str, positions: np.ndarray) -> Heads:
        """Queries and keys are normed where the model does that, and rotated."""
        config = self.config

        def heads(name: str, count: int) -> np.ndarray:
            projected = self.linear(x, f"{prefix}self_attn.{name}_proj")
            split = projected.reshape(len(x), count, config.head_dim).swapaxes(0, 1)
            if name == "v":
                return split
            if config.qk_norm:
                split = self.norm(split, f"{prefix}self_attn.{name}_norm")
            return self.rotate(split, positions)

        keys, values = (heads(name, config.num_kv_heads) for name in "kv")
        return Heads(heads("q", config.num_heads), keys, values)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.linear(hidden, self.head_name)

    @property
    def head_name(self) -> str:
        return "model.embed_tokens" if self.config.tied_embeddings else "lm_head"


def mix(heads: Heads, mask: np.ndarray) -> np.ndarray:
    """Softmax attention; mask: [rows, positions] bool, which position each row attends to."""
    queries, keys, values = heads
    num_kv_heads, _, head_dim = keys.shape
    grouped = queries.reshape(num_kv_heads, -1, *queries.shape[1:])
    keys, values = keys[:, None], values[:, None]  # a group of query heads shares each
    scores = grouped @ keys.swapaxes(-1, -2) / np.float32(np.sqrt(head_dim))
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = (weights @ values).reshape(queries.shape)
    return mixed
