"""Weights and arithmetic of the reference transformer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from edge_spec.core.model_info import Tensors
from edge_spec.core.model_parts import LEAST_SUM, SWISH_SLOPE


class Heads(NamedTuple):
    """Holds what attention takes, each [heads, rows, head_dim]; groups of queries share keys."""

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
    """Softmax attention; mask: [rows, positions] bool, which position each row attends to. Products
    of queries and keys are divided by `divisor` and capped where there is a cap. sinks: of each
    head, a score more, whose weight goes nowhere. bias: [heads, rows, positions], added."""
    queries, keys, values = heads
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    keys, values = keys[:, None], values[:, None]  # a group of query heads shares each
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
    """Keeps scores between -cap and cap (Gemma Team 2024, Gemma 2)."""
    capped: np.ndarray = np.tanh(scores / np.float32(cap)) * np.float32(cap)
    return capped


def side_by_side(heads: np.ndarray) -> np.ndarray:
    """[heads, rows, head_dim] -> [rows, heads * head_dim]."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def swish(gate: np.ndarray, slope: float = 1.0) -> np.ndarray:
    sharpened = np.float32(slope) * np.clip(gate, -80 / slope, None)  # within float32
    activated: np.ndarray = gate / (1 + np.exp(-sharpened))
    return activated


def sigmoid(scores: np.ndarray) -> np.ndarray:
    shares: np.ndarray = 1 / (1 + np.exp(-np.clip(scores, -80, None)))  # within float32
    return shares


def gelu_tanh(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: np.ndarray = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return activated


def gelu(gate: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, by the error function itself."""
    inner = gate.astype(np.float64).ravel() / math.sqrt(2)
    error = np.fromiter(map(math.erf, inner), np.float64, inner.size).reshape(gate.shape)
    activated: np.ndarray = (0.5 * gate * (1 + error)).astype(np.float32)
    return activated


def _relu(x: np.ndarray) -> np.ndarray:
    activated: np.ndarray = np.maximum(x, np.float32(0))
    return activated


ACTIVATIONS = {"silu": swish, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": _relu}


MAX_ROWS = 512  # of a pass


class Positions(NamedTuple):
    """Holds where the rows of a pass stand in the text, and what is cached with them."""

    rows: np.ndarray  # [rows] int64
    cached: np.ndarray  # [positions] int64


class Context(Protocol):
    """The text before the rows of a pass, which a layer, by its number, keeps them with."""

    def attend(self, layer: int, heads: Heads) -> np.ndarray:
        """Returns what attention makes of its heads, [query heads, rows, head_dim]."""

    def attend_to_source(self, layer: int, queries: np.ndarray) -> np.ndarray:
        """The same with the keys and values of the layer that this one has them from."""

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        """Returns what a convolution takes in before each of its rows, the nearest first.

        gated: [rows, hidden] -> [count, rows, hidden], zeros before the text."""


class Arithmetic:
    """Computes in float32 with weights that are read when a layer is first used and then kept."""

    def __init__(self, tensors: Tensors, context_length: int | None = None) -> None:
        self.config = tensors.config
        if context_length is not None:
            shorter = min(context_length, self.config.context_length)
            self.config = replace(self.config, context_length=shorter)
        self._tensors = tensors
        self._weights: dict[str, np.ndarray] = {}
        self._tables = {
            rotation: rotation.tables(self.config.context_length)
            for rotation in self.config.rotations
        }

    def weight(self, name: str) -> np.ndarray:
        if name not in self._weights:
            self._weights[name] = self._tensors.float32(name)
        return self._weights[name]

    def rows(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """These rows of a matrix, [rows, columns]."""
        found: np.ndarray = self.weight(name)[numbers]
        return found

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """x: [rows, in] -> [rows, out]."""
        y: np.ndarray = x @ self.weight(name + ".weight").T
        return y + self.weight(name + ".bias") if self._has_bias(name) else y

    def _has_bias(self, name: str) -> bool:
        config = self.config
        if ".mlp." in name:
            is_dense = not name.endswith("router") and ".experts." not in name
            return config.mlp_bias if is_dense else bool(config.experts and config.experts.biases)
        if name.endswith("o_proj"):
            return config.output_bias
        return config.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj"))

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Root mean square normalization over the last axis (Zhang and Sennrich 2019), or that of
        Ba et al. 2016."""
        if self.config.layer_norm:
            x = x - x.mean(axis=-1, keepdims=True)
        normed: np.ndarray = self._unweighted(x) * self.weight(name + ".weight")
        return normed + self.weight(name + ".bias") if self.config.layer_norm else normed

    def _unweighted(self, x: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_epsilon)
        normed: np.ndarray = x * scale.astype(np.float32)
        return normed

    def rotate(self, x: np.ndarray, layer: int, positions: np.ndarray) -> np.ndarray:
        """x: [heads, rows, head_dim], turned by its positions, halves paired (Su et al. 2021)."""
        rotation = self.config.rotation(self.config.kind(layer))
        if rotation is None:
            return x
        cos, sin = (table[positions] for table in self._tables[rotation])
        turned, rest = np.split(x, [rotation.size], axis=-1)
        first, second = np.split(turned, 2, axis=-1)
        halves = [first * cos - second * sin, second * cos + first * sin]
        return np.concatenate([*halves, rest], axis=-1)

    def embed(self, tokens: np.ndarray, positions: np.ndarray, half: str = "model") -> np.ndarray:
        """tokens, positions: [rows] -> [rows, hidden]. half: "model" or "encoder"."""
        embedded = self.scaled(self.weight("model.embed_tokens.weight")[tokens])
        if self.config.position_table:
            table = self.weight(f"{half}.embed_positions.weight")
            embedded = embedded + table[positions]
        return self.norm(embedded, f"{half}.input_norm") if self.config.input_norm else embedded

    def scaled(self, embeddings: np.ndarray) -> np.ndarray:
        """The residual stream before the first layer."""
        return _times(embeddings, self.config.embedding_scale)

    def layer_inputs(self, tokens: np.ndarray, embedded: np.ndarray) -> np.ndarray | None:
        """Returns what each layer has for itself of the tokens, [layers, rows, size], or None.

        embedded: the tokens' own embeddings, as the first layer takes them."""
        own = self.config.layer_embeddings
        if own is None:
            return None
        shape = (len(tokens), self.config.num_layers, own.size)
        projected = self.linear(embedded, "model.per_layer_model_projection")
        projected = _times(projected, own.projected_scale).reshape(shape)
        stored = _times(self.rows("model.embed_tokens_per_layer.weight", tokens), own.scale)
        both = self.norm(projected, "model.per_layer_projection_norm") + stored.reshape(shape)
        return _times(both, own.sum_scale).swapaxes(0, 1)

    def layer(
        self,
        x: np.ndarray,
        layer: int,
        positions: np.ndarray,
        context: Context,
        memory: np.ndarray | None = None,
        inputs: np.ndarray | None = None,
    ) -> np.ndarray:
        """The residual stream [rows, hidden] after a layer; positions: [rows]. memory: keys and
        values of an encoded source [layers, 2, heads, source, head_dim], where there is one.
        inputs: as `layer_inputs` gives them."""
        prefix = f"model.layers.{layer}."
        x, normed = self.read(x, prefix + "input_layernorm")
        if self.config.kind(layer).convolution is not None:
            update = self._convolved(normed, layer, context)
        else:
            mixed = self._attended(normed, layer, positions, context)
            update = self.linear(side_by_side(mixed), prefix + "self_attn.o_proj")
        x = x + self._update(update, prefix + "self_attn.")
        if memory is not None:
            x, normed = self.read(x, prefix + "cross_attn.input_norm")
            x = x + self._crossed(normed, prefix + "cross_attn.", memory[layer])
        x = self.with_mlp(x, prefix, self.config.mixes(layer))
        if inputs is not None:
            x = x + self._of_token(x, prefix, inputs[layer])
        return x * self.weight(prefix + "layer_scalar") if self.config.layer_scale else x

    def _of_token(self, x: np.ndarray, prefix: str, own: np.ndarray) -> np.ndarray:
        """Returns what a layer adds of what it has for itself of each token, [rows, size]."""
        gate = self.linear(x, prefix + "per_layer_input_gate")
        activated = ACTIVATIONS[self.config.activation](gate)
        update = self.linear(activated * own, prefix + "per_layer_projection")
        return self.norm(update, prefix + "post_per_layer_input_norm")

    def _convolved(self, x: np.ndarray, layer: int, context: Context) -> np.ndarray:
        """A gated short convolution over each element by itself (Liquid AI 2025, LFM2)."""
        prefix = f"model.layers.{layer}.conv."
        enters, leaves, values = np.split(self.linear(x, prefix + "in_proj"), 3, axis=-1)
        gated = enters * values
        taps = self.weight(prefix + "conv.weight").T  # [kernel, hidden], the row's own last
        convolved = gated * taps[-1]
        for tap, before in zip(taps[-2::-1], context.precede(layer, gated), strict=True):
            convolved = convolved + before * tap
        return self.linear(leaves * convolved, prefix + "out_proj")

    def with_mlp(self, x: np.ndarray, prefix: str, mixes: bool = False) -> np.ndarray:
        """The residual stream after the MLP of the layer that `prefix` names, or its experts."""
        x, normed = self.read(x, prefix + "post_attention_layernorm")
        prefix += "mlp."
        experts = self.config.experts
        if not mixes:
            update = self._mlp(normed, prefix)
        elif experts is not None and experts.beside_mlp:
            update = self.norm(self._mlp(normed, prefix), prefix + "dense_post_norm")
            mixed = self._mixture(self.norm(x, prefix + "experts_norm"), prefix, x)
            update = update + self.norm(mixed, prefix + "experts_post_norm")
        else:
            update = self._mixture(normed, prefix, normed)
        updated: np.ndarray = x + self._update(update, prefix)
        return updated

    def _crossed(self, x: np.ndarray, prefix: str, memory: np.ndarray) -> np.ndarray:
        """Returns what attention to the source adds to x, normed.

        memory: [2, heads, source, head_dim]."""
        queries = self.split_heads(x, prefix + "q_proj")
        seen = np.ones((len(x), memory.shape[2]), bool)
        mixed = mix(Heads(queries, *memory), seen, self.divisor(self.config.head_dim), None)
        return self.linear(side_by_side(mixed), prefix + "o_proj")

    def split_heads(self, x: np.ndarray, name: str) -> np.ndarray:
        """x: [rows, hidden] -> [heads, rows, head_dim] by a matrix."""
        return self.linear(x, name).reshape(len(x), -1, self.config.head_dim).swapaxes(0, 1)

    def _mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        if not self.config.gated_mlp:
            activated = ACTIVATIONS[self.config.activation](self.linear(x, prefix + "up_proj"))
            return self.linear(activated, prefix + "down_proj")
        gate, up = self.linear(x, prefix + "gate_proj"), self.linear(x, prefix + "up_proj")
        experts = self.config.experts
        if experts is None or experts.clamp is None:
            activated = ACTIVATIONS[self.config.activation](gate)  # GLU variants: Shazeer 2020
        else:
            activated = swish(np.minimum(gate, experts.clamp), SWISH_SLOPE)
            up = np.clip(up, -experts.clamp, experts.clamp) + 1
        return self.linear(activated * up, prefix + "down_proj")

    def _mixture(self, x: np.ndarray, prefix: str, routed: np.ndarray) -> np.ndarray:
        """Adds what the experts add that each row takes, by their weights (Shazeer et al. 2017).
        routed: what the router reads."""
        taken, weights = self._routed(routed, prefix)
        update = np.zeros_like(x)
        for expert in np.unique(taken):
            rows, places = np.nonzero(taken == expert)
            added = self._mlp(x[rows], f"{prefix}experts.{expert}.")
            update[rows] += weights[rows, places, None] * added
        return update

    def _routed(self, x: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """The experts that each row takes, and their weights, each [rows, experts used]."""
        experts = self.config.experts
        assert experts is not None
        x = self.norm(x, prefix + "router_norm") if experts.beside_mlp else x
        scores = _times(self.linear(x, prefix + "router"), experts.score_scale)
        if experts.sigmoid:
            weights = scores = sigmoid(scores)
        else:
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
        if experts.choice_bias:
            scores = scores + self.weight(prefix + "expert_bias")
        taken = np.argsort(-scores, axis=-1, kind="stable")[:, : self.config.experts_used]
        weights = np.take_along_axis(weights, taken, axis=-1)
        if experts.normalized:
            least = np.float32(LEAST_SUM if experts.sigmoid else 0)
            weights /= weights.sum(axis=-1, keepdims=True) + least
        if experts.expert_scales:
            weights = weights * self.weight(prefix + "expert_scale")[taken]
        return taken, _times(weights, experts.scale)

    def read(self, x: np.ndarray, norm: str) -> tuple[np.ndarray, np.ndarray]:
        """The residual stream as it goes on, and what a sublayer reads of it."""
        config = self.config
        if config.norm_places == "after":
            return x, x
        is_first = norm.endswith("layers.0.input_layernorm")
        normed = x if is_first and not config.embedding_norm else self.norm(x, norm)
        return (normed if config.norm_places == "stream" else x), normed

    def _update(self, update: np.ndarray, sublayer: str) -> np.ndarray:
        """Returns what a sublayer adds to the residual stream, [rows, hidden]."""
        if self.config.norm_places in ("around", "after"):
            update = self.norm(update, sublayer + "post_norm")
        return _times(update, self.config.residual_scale)

    def _attended(
        self, x: np.ndarray, layer: int, positions: np.ndarray, context: Context
    ) -> np.ndarray:
        """Returns what attention makes of x, normed; [query heads, rows, head_dim]."""
        parts = "qkv" if self.config.kv_source(layer) == layer else "q"
        queries, *others = (self._heads(x, layer, part, positions) for part in parts)
        if others:
            return context.attend(layer, Heads(queries, *others))
        return context.attend_to_source(layer, queries)

    def _heads(self, x: np.ndarray, layer: int, part: str, positions: np.ndarray) -> np.ndarray:
        """Queries, keys or values, as `part` says: "q", "k" or "v". Queries and keys are rotated,
        and all are normed where the model does that."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn."
        is_key = part == "v" and config.kind(layer).keys_as_values
        projected = self.linear(x, f"{prefix}{'k' if is_key else part}_proj")
        norm = f"{prefix}{part}_norm" if config.qk_norm and part != "v" else None
        if norm and config.qk_norm_whole:
            projected, norm = self.norm(projected, norm), None
        head_dim = config.heads(layer).head_dim
        split = projected.reshape(len(x), -1, head_dim).swapaxes(0, 1)
        if part == "v":
            return self._unweighted(split) if config.value_norm else split
        if config.qk_norm_after_rope:
            split = self.rotate(split, layer, positions)
        split = self.norm(split, norm) if norm else split
        return split if config.qk_norm_after_rope else self.rotate(split, layer, positions)

    def mix(self, layer: int, heads: Heads, mask: np.ndarray, positions: Positions) -> np.ndarray:
        """Softmax attention of the rows that `mask` [rows, cached] bool and the layer's window let
        each row see; [heads, rows, head_dim]."""
        config, window = self.config, self.config.kind(layer).window
        if window is not None:
            mask = mask & (positions.rows[:, None] - positions.cached < window)
        sinks = self._sinks(layer) if config.attention_sinks else None
        bias = None
        if config.relative_positions is not None:
            weight = self.weight("model.relative_bias.weight")
            bias = config.relative_positions.bias(weight, positions.rows, positions.cached)
        divisor = self.divisor(config.heads(layer).head_dim)
        return mix(heads, mask, divisor, config.attention_softcap, sinks, bias)

    def divisor(self, head_dim: int) -> float:
        """Returns what queries times keys are divided by."""
        scale = self.config.attention_scale
        return float(np.sqrt(head_dim)) if scale is None else 1 / scale

    def _sinks(self, layer: int) -> np.ndarray:
        return self.weight(f"model.layers.{layer}.self_attn.sinks")

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.final(self.linear(hidden, self.head_name))

    def final(self, scores: np.ndarray) -> np.ndarray:
        """The logits that the head's products [rows, vocab] make."""
        if self.config.logit_bias:
            scores = scores + self.weight("lm_head.bias")
        scaled, cap = _times(scores, self.config.logit_scale), self.config.logit_softcap
        return scaled if cap is None else softcap(scaled, cap)

    @property
    def head_name(self) -> str:
        return "model.embed_tokens" if self.config.tied_embeddings else "lm_head"


def _times(x: np.ndarray, scale: float) -> np.ndarray:
    scaled: np.ndarray = x if scale == 1.0 else x * np.float32(scale)
    return scaled
