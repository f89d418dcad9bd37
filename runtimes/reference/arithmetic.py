"""Weights and arithmetic of the reference transformer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_spec.core.model import Tensors

MAX_ROWS = 512  # of a pass


class Arithmetic:
    """Computes in float32 with weights that are read when a layer is first used and then kept."""

    def __init__(self, tensors: Tensors, context_length: int | None = None) -> None:
        self.config = tensors.config
        if context_length is not None:
            shorter = min(context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        self._tensors = tensors
        self._weights: dict[str, np.ndarray] = {}
        self._squares: dict[str, np.ndarray] | None = None  # of inputs, while they are observed
        self.cos, self.sin = self.config.rope_tables(self.config.context_length)

    def weight(self, name: str) -> np.ndarray:
        if name not in self._weights:
            self._weights[name] = self._tensors.float32(name)
        return self._weights[name]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """x: [rows, in] -> [rows, out]."""
        if self._squares is not None:
            sums = np.square(x, dtype=np.float64).sum(axis=0)
            self._squares[name + ".weight"] = self._squares.get(name + ".weight", 0) + sums
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

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        tied = self.config.tied_embeddings
        return self.linear(hidden, "model.embed_tokens" if tied else "lm_head")
