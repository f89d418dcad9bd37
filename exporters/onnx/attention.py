"""Attention of a layer: GroupQueryAttention, or one of two forms (stacked.py), and norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.rope import Rope
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import stacked
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes
from edge_spec.exporters.onnx.weights import OnnxWeights


def vector(nodes: Nodes, checkpoint: StoredCheckpoint, name: str) -> str:
    return nodes.weights.add(name, checkpoint.float32(name))


def norm(nodes: Nodes, checkpoint: StoredCheckpoint, x: str, name: str, output: str = "") -> str:
    """Normalization by the vectors of that name."""
    config = checkpoint.config
    return nodes.add(
        "LayerNormalization" if config.layer_norm else "SimplifiedLayerNormalization",
        [x, *norm_vectors(nodes, checkpoint, name)],
        output or name + ".output",
        axis=-1,
        epsilon=config.norm_epsilon,
    )


def norm_vectors(nodes: Nodes, checkpoint: StoredCheckpoint, name: str) -> list[str]:
    ends = ("weight", "bias") if checkpoint.config.layer_norm else ("weight",)
    return [vector(nodes, checkpoint, f"{name}.{end}") for end in ends]


def attention_biases(config: ModelConfig, prefix: str, parts: str = "qkv") -> list[str]:
    """The names of those of an attention's first matrices."""
    return [f"{prefix}{part}_proj.bias" for part in parts] if config.qkv_bias else []


def output_bias(config: ModelConfig, prefix: str) -> list[str]:
    """The name of that of an attention's last matrix."""
    return [prefix + "o_proj.bias"] if config.output_bias else []


class Attention:
    """Adds that of one layer after another. ropes: the names of each one's tables; biases: of what
    is added to scores, by a layer's window."""

    def __init__(
        self,
        nodes: Nodes,
        weights: OnnxWeights,
        checkpoint: StoredCheckpoint,
        ropes: Mapping[Rope, Sequence[str]],
        biases: Mapping[int | None, str],
    ) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config
        self._ropes, self._biases = ropes, biases
        self._is_stacked = stacked.pays(checkpoint.config)

    def add(self, x: str, layer: int) -> str:
        """x: [1, rows, hidden] -> the same, what the last matrix makes of the heads."""
        config, nodes = self._config, self._nodes
        prefix = f"model.layers.{layer}.self_attn."
        names = [f"{prefix}{part}_proj.weight" for part in "qkv"]
        packed = self._weights.linear(
            x, names, attention_biases(config, prefix)
        )  # q, k and v side by side
        if config.qk_norm and self._is_stacked:
            parts = self._normed_heads(packed, layer, prefix)
            packed = nodes.add("Concat", parts, prefix + "normed", axis=-1)
        outputs = [prefix + "output", f"present.{layer}.key", f"present.{layer}.value"]
        if self._is_stacked:
            output = stacked.either(
                nodes,
                lambda inner, end: stacked.attention(inner, config, packed, layer, end),
                lambda inner, end: self._grouped(inner, packed, layer, end),
                outputs,
            )
        else:
            output, *_ = self._grouped(nodes, packed, layer, "")
        return self._weights.linear(output, [prefix + "o_proj.weight"], output_bias(config, prefix))

    def _grouped(self, nodes: Nodes, packed: str, layer: int, end: str) -> list[str]:
        """Adds GroupQueryAttention, `end` ending the names of what it returns."""
        config, kind = self._config, self._config.kind(layer)
        prefix = f"model.layers.{layer}.self_attn."
        attended = nodes.add("Gather", [packed, "attention_rows"], prefix + "attended", axis=1)
        inputs = [attended, "", ""]
        if config.qk_norm and not self._is_stacked:
            inputs = self._normed_heads(inputs[0], layer, prefix)
        rotation = ["", "", ""]
        if kind.rope is not None and not config.qk_norm_after_rope:
            rotation = [*self._ropes[kind.rope], "position_ids"]
        caches = [f"present.{layer}.{part}{end}" for part in ("key", "value")]
        mixed = nodes.add(
            "GroupQueryAttention",
            [
                *inputs,
                f"past.{layer}.key",
                f"past.{layer}.value",
                "seqlens_k",
                "total_sequence_length",
                *rotation,
                self._biases[kind.window],
                *(
                    [vector(nodes, self._checkpoint, prefix + "sinks")]
                    if config.attention_sinks
                    else []
                ),
            ],
            [prefix + "mixed", *caches],
            domain=CONTRIB,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            do_rotary=int(rotation[0] != ""),
            **self._score_attributes(),
        )
        output = nodes.add("Gather", [mixed, "kept_rows"], f"{prefix}output{end}", axis=1)
        return [output, *caches]

    def _score_attributes(self) -> dict[str, float]:
        """What the operator makes of queries times keys, where it is not its own choice."""
        stated = {"scale": self._config.attention_scale, "softcap": self._config.attention_softcap}
        return {name: value for name, value in stated.items() if value is not None}

    def _normed_heads(self, packed: str, layer: int, prefix: str) -> list[str]:
        """Splits q, k and v and normalizes q and k, in some models once they are rotated."""
        config, nodes = self._config, self._nodes
        sizes = np.array([config.query_size, config.kv_size, config.kv_size])
        parts = [f"{prefix}{part}.split" for part in "qkv"]
        nodes.add("Split", [packed, nodes.weights.add("qkv_sizes", sizes)], parts, axis=-1)
        for i, part in enumerate("qk"):
            name = f"{prefix}{part}"
            if config.qk_norm_after_rope:
                parts[i] = self._rotated(parts[i], layer, name)
            if config.qk_norm_whole:
                parts[i] = norm(nodes, self._checkpoint, parts[i], name + "_norm", name + ".normed")
            else:
                parts[i] = self._norm_each_head(parts[i], name)
        return parts

    def _rotated(self, x: str, layer: int, name: str) -> str:
        rope = self._config.kind(layer).rope
        if rope is None:
            return x
        inputs = [x, "position_ids", *self._ropes[rope]]
        return self._nodes.add("RotaryEmbedding", inputs, name + ".rotated", domain=CONTRIB)

    def _norm_each_head(self, x: str, name: str) -> str:
        nodes = self._nodes
        heads = nodes.weights.add("head_shape", np.array([1, 0, -1, self._config.head_dim]))
        flat = nodes.weights.add("flat_shape", np.array([1, 0, -1]))
        split = nodes.add("Reshape", [x, heads], name + ".heads")
        normed = norm(nodes, self._checkpoint, split, name + "_norm", name + ".normed")
        return nodes.add("Reshape", [normed, flat], name + ".flat")
