"""Weights and arithmetic of the reference transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edge_spec.core.decoder_walk import DecoderWalk
from edge_spec.core.model_info import Tensors
from edge_spec.core.model_parts import LEAST_SUM, SWISH_SLOPE, Experts


class Heads(NamedTuple):
    """Attention's inputs, each [heads, rows, head_dim]; groups of query heads share keys."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def mix(
    heads: Heads,
    mask: np.ndarray,
    divisor: float,
    cap: float | None,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention. mask: [rows, positions] bool, which positions a row sees.

    Scores are divided by `divisor`, then capped. sinks: an extra score per head whose weight is
    dropped. bias: [heads, rows, positions], added.
    """
    queries, keys, values = heads
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    keys, values = keys[:, None], values[:, None]  # each shared by a group of query heads
    scores = grouped @ keys.swapaxes(-1, -2) / np.float32(divisor)
    if cap is not None:
        scores = softcap(scores, cap)
    if bias is not None:
        scores = scores + bias.reshape(scores.shape)
    scores = np.where(mask, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    lost: np.ndarray | float = 0.0
    if sinks is not None:
        own = sinks.reshape(len(keys), -1, 1, 1)
        highest = np.maximum(highest, own)
        lost = np.exp(own - highest)
    weights = np.exp(scores - highest)
    weights /= weights.sum(axis=-1, keepdims=True) + lost
    mixed: np.ndarray = (weights @ values).reshape(queries.shape)
    return mixed


def softcap(scores: np.ndarray, cap: float) -> np.ndarray:
    """Bound scores by `cap` (Gemma Team 2024, Gemma 2)."""
    capped: np.ndarray = np.tanh(scores / np.float32(cap)) * np.float32(cap)
    return capped


def swish(gate: np.ndarray, slope: float = 1.0) -> np.ndarray:
    sharpened = np.float32(slope) * np.clip(gate, -80 / slope, None)  # stay within float32
    activated: np.ndarray = gate / (1 + np.exp(-sharpened))
    return activated


def sigmoid(scores: np.ndarray) -> np.ndarray:
    shares: np.ndarray = 1 / (1 + np.exp(-np.clip(scores, -80, None)))  # stay within float32
    return shares


def gelu_tanh(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


def gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, with the exact error function."""
    inner = gate.astype(np.float64).ravel() / math.sqrt(2)
    error = np.fromiter(map(math.erf, inner), np.float64, inner.size).reshape(gate.shape)
    activated: np.ndarray = (0.5 * gate * (1 + error)).astype(np.float32)
    return activated


def _relu(x: np.ndarray) -> np.ndarray:
    activated: np.ndarray = np.maximum(x, np.float32(0))
    return activated


ACTIVATIONS = {"silu": swish, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": _relu}


MAX_ROWS = 512  # of a pass


class Weights:
    """Read weights at first use, and keep them in float32."""

    def __init__(self, tensors: Tensors, context_length: int | None = None) -> None:
        self.config = tensors.config
        if context_length is not None:
            shorter = min(context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        self._tensors = tensors
        self._kept: dict[str, np.ndarray] = {}
        self.tables = {
            rotation: rotation.tables(self.config.context_length)
            for rotation in self.config.rotations
        }

    def whole(self, name: str) -> np.ndarray:
        if name not in self._kept:
            self._kept[name] = self._tensors.float32(name)
        return self._kept[name]

    def rows(self, name: str, numbers: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.whole(name)[numbers]
        return found


class Arithmetic(DecoderWalk[np.ndarray]):
    """A pass in float32. tokens, positions: [rows]."""

    # (layer, heads): attention of a layer with its own keys, [query heads, rows, head_dim].
    attend_to_own: Callable[[int, Heads], np.ndarray]
    # (layer, queries): the same with the keys and values of the layer's source.
    attend_to_another: Callable[[int, np.ndarray], np.ndarray]
    # (layer, gated [rows, hidden]): a convolution's inputs before each row, nearest first, [count,
    # rows, hidden]; zeros before the text.
    precede: Callable[[int, np.ndarray], np.ndarray]

    def __init__(self, weights: Weights, tokens: np.ndarray, positions: np.ndarray) -> None:
        self.weights, self.config = weights, weights.config
        self.tokens, self.positions = tokens, positions

    def vector(self, name: str) -> np.ndarray:
        return self.weights.whole(name)

    def look_up(self, table: str, output: str) -> np.ndarray:
        is_placed = table.endswith("embed_positions.weight")
        return self.weights.rows(table, self.positions if is_placed else self.tokens)

    def norm_inputs(self, x: np.ndarray, name: str, output: str) -> np.ndarray:
        apart = x.reshape(len(x), self.config.num_layers, -1)
        return self.norm(apart, name).reshape(x.shape)

    def split_inputs(self, x: np.ndarray, outputs: Sequence[str]) -> Sequence[np.ndarray]:
        return np.split(x, len(outputs), axis=-1)

    def scale_layer(
        self, update: np.ndarray, residual: np.ndarray, prefix: str
    ) -> tuple[np.ndarray | None, np.ndarray]:
        return None, (residual + update) * self.vector(prefix + "layer_scalar")

    def linear(
        self, x: np.ndarray, prefix: str, parts: Sequence[str], has_bias: bool = False
    ) -> np.ndarray:
        (part,) = parts
        y: np.ndarray = x @ self.vector(f"{prefix}{part}.weight").T
        return y + self.vector(f"{prefix}{part}.bias") if has_bias else y

    def norm(self, x: np.ndarray, name: str, output: str = "") -> np.ndarray:
        """RMS norm over the last axis (Zhang and Sennrich 2019), or layer norm (Ba et al. 2016)."""
        if self.config.layer_norm:
            x = x - x.mean(axis=-1, keepdims=True)
        normed: np.ndarray = self.norm_values(x) * self.vector(name + ".weight")
        return normed + self.vector(name + ".bias") if self.config.layer_norm else normed

    def norm_values(self, x: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_epsilon)
        normed: np.ndarray = x * scale.astype(np.float32)
        return normed

    def add_and_norm(
        self, update: np.ndarray | None, residual: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        stream = residual if update is None else residual + update
        return self.norm(stream, name), stream

    def plus(self, x: np.ndarray, y: np.ndarray, output: str) -> np.ndarray:
        added: np.ndarray = x + y
        return added

    def product(self, x: np.ndarray, y: np.ndarray, output: str) -> np.ndarray:
        multiplied: np.ndarray = x * y
        return multiplied

    def times(self, x: np.ndarray, scale: float, output: str) -> np.ndarray:
        scaled: np.ndarray = x if scale == 1.0 else x * np.float32(scale)
        return scaled

    def softcap(self, x: np.ndarray, cap: float, output: str) -> np.ndarray:
        return softcap(x, cap)

    def activation(self, gate: np.ndarray, prefix: str) -> np.ndarray:
        return ACTIVATIONS[self.config.activation](gate)

    def head(self, hidden: np.ndarray, output: str) -> np.ndarray:
        scores: np.ndarray = hidden @ self.vector(self.head_name).T
        return scores

    def split_heads(self, x: np.ndarray, layer: int, part: str) -> np.ndarray:
        return x.reshape(len(x), -1, self.config.heads(layer).head_dim).swapaxes(0, 1)

    def rotate(self, x: np.ndarray, layer: int, part: str) -> np.ndarray:
        """x: [heads, rows, head_dim], rotated by positions, halves paired (Su et al. 2021)."""
        rotation = self.config.rotation(self.config.kind(layer))
        if rotation is None:
            return x
        cos, sin = (table[self.positions] for table in self.weights.tables[rotation])
        turned, rest = np.split(x, [rotation.size], axis=-1)
        first, second = np.split(turned, 2, axis=-1)
        halves = [first * cos - second * sin, second * cos + first * sin]
        return np.concatenate([*halves, rest], axis=-1)

    def convolve(self, x: np.ndarray, layer: int) -> np.ndarray:
        prefix = f"model.layers.{layer}.conv."
        enters, leaves, values = np.split(self.linear(x, prefix, ["in_proj"]), 3, axis=-1)
        gated = enters * values
        taps = self.vector(prefix + "conv.weight").T  # [kernel, hidden], the row's own last
        convolved = gated * taps[-1]
        for tap, before in zip(taps[-2::-1], self.precede(layer, gated), strict=True):
            convolved = convolved + before * tap
        return self.linear(leaves * convolved, prefix, ["out_proj"])

    def attend(self, x: np.ndarray, layer: int) -> np.ndarray:
        parts = "qkv" if self.config.kv_source(layer) == layer else "q"
        queries, *others = (self.heads(x, layer, part) for part in parts)
        if others:
            mixed = self.attend_to_own(layer, Heads(queries, *others))
        else:
            mixed = self.attend_to_another(layer, queries)
        return self.join_heads(mixed, f"model.layers.{layer}.self_attn.")

    def attend_all(self, x: np.ndarray, prefix: str) -> np.ndarray:
        heads = Heads(*(self.project_heads(x, prefix, part) for part in "qkv"))
        relative, bias = self.config.relative_positions, None
        if relative is not None:
            weight = self.vector("encoder.relative_bias.weight")
            bias = relative.bias(weight, self.positions, self.positions, both_ways=True)
        return self.join_heads(self.mix_all(heads, bias), prefix)

    def mix_all(self, heads: Heads, bias: np.ndarray | None = None) -> np.ndarray:
        """Attention in which each row sees all keys."""
        seen = np.ones((heads.queries.shape[1], heads.keys.shape[1]), bool)
        return mix(heads, seen, self._divisor(self.config.head_dim), None, bias=bias)

    def project_heads(self, x: np.ndarray, prefix: str, part: str) -> np.ndarray:
        """Project x: [rows, hidden] -> [heads, rows, head_dim]."""
        projected = self.linear(x, prefix, [f"{part}_proj"], self.config.qkv_bias)
        return projected.reshape(len(x), -1, self.config.head_dim).swapaxes(0, 1)

    def join_heads(self, mixed: np.ndarray, prefix: str) -> np.ndarray:
        """Project mixed: [heads, rows, head_dim] -> [rows, hidden]."""
        joined = mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)
        return self.linear(joined, prefix, ["o_proj"], self.config.output_bias)

    def mix(
        self, layer: int, heads: Heads, mask: np.ndarray, rows: np.ndarray, cached: np.ndarray
    ) -> np.ndarray:
        """Softmax attention, [heads, rows, head_dim]. mask: [rows, cached] bool, further limited by
        the layer's window. rows, cached: positions."""
        config, window = self.config, self.config.kind(layer).window
        if window is not None:
            mask = mask & (rows[:, None] - cached < window)
        sinks = bias = None
        if config.attention_sinks:
            sinks = self.vector(f"model.layers.{layer}.self_attn.sinks")
        if config.relative_positions is not None:
            weight = self.vector("model.relative_bias.weight")
            bias = config.relative_positions.bias(weight, rows, cached)
        divisor = self._divisor(config.heads(layer).head_dim)
        return mix(heads, mask, divisor, config.attention_softcap, sinks, bias)

    def _divisor(self, head_dim: int) -> float:
        scale = self.config.attention_scale
        return float(np.sqrt(head_dim)) if scale is None else 1 / scale

    def gate(self, x: np.ndarray, prefix: str) -> np.ndarray:
        experts = self.config.experts
        if experts is None or ".experts." not in prefix:
            return super().gate(x, prefix)
        gate, up = (self.linear(x, prefix, [f"{p}_proj"], experts.biases) for p in ("gate", "up"))
        if experts.clamp is None:
            return self.product(self.activation(gate, prefix), up, "")
        activated = swish(np.minimum(gate, experts.clamp), SWISH_SLOPE)
        return self.product(activated, np.clip(up, -experts.clamp, experts.clamp) + 1, "")

    def mix_experts(self, x: np.ndarray, routed: np.ndarray, prefix: str) -> np.ndarray:
        """Mix the chosen experts' outputs by their weights (Shazeer et al. 2017)."""
        experts = self.config.experts
        assert experts is not None
        taken, weights = self._route(routed, experts, prefix)
        update = np.zeros_like(x)
        for expert in np.unique(taken):
            rows, places = np.nonzero(taken == expert)
            own = f"{prefix}experts.{expert}."
            added = self.linear(self.gate(x[rows], own), own, ["down_proj"], experts.biases)
            update[rows] += weights[rows, places, None] * added
        return update

    def _route(self, x: np.ndarray, experts: Experts, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's experts and their weights, each [rows, experts used]."""
        scores = self.linear(x, prefix, ["router"], experts.biases)
        scores = self.times(scores, experts.score_scale, "")
        if experts.sigmoid:
            weights = scores = sigmoid(scores)
        else:
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
        if experts.choice_bias:
            scores = scores + self.vector(prefix + "expert_bias")
        taken = np.argsort(-scores, axis=-1, kind="stable")[:, : self.config.experts_used]
        weights = np.take_along_axis(weights, taken, axis=-1)
        if experts.normalized:
            least = np.float32(LEAST_SUM if experts.sigmoid else 0)
            weights /= weights.sum(axis=-1, keepdims=True) + least
        if experts.expert_scales:
            weights = weights * self.vector(prefix + "expert_scale")[taken]
        return taken, self.times(weights, experts.scale, "")
