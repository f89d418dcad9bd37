"""Attention of a layer: GroupQueryAttention, or one of two forms (stacked.py), and norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Rotation
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
    """Adds that of one layer after another. rotations: the names of each one's tables; biases: of
    what is added to scores, by a layer's window."""

    def __init__(
        self,
        nodes: Nodes,
        weights: OnnxWeights,
        checkpoint: StoredCheckpoint,
        rotations: Mapping[Rotation, Sequence[str]],
        biases: Mapping[int | None, str],
    ) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._config = checkpoint.config
        self._rotations, self._biases = rotations, biases
        self._is_stacked = stacked.pays(checkpoint.config)

    def add(self, x: str, layer: int) -> str:
        """x: [1, rows, hidden] -> the same, what the last matrix makes of the heads."""
        config, nodes = self._config, self._nodes
        prefix = f"model.layers.{layer}.self_attn."
        own = self._parts(layer)
        names = [f"{prefix}{part}_proj.weight" for part in own]
        packed = self._weights.linear(
            x, names, attention_biases(config, prefix, own)
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

    def _parts(self, layer: int) -> str:
        """Returns those of "qkv" that a layer has matrices of its own for."""
        config = self._config
        if config.kv_source(layer) != layer:
            return "q"
        return "qk" if config.kind(layer).keys_as_values else "qkv"

    def _grouped(self, nodes: Nodes, packed: str, layer: int, end: str) -> list[str]:
        """Adds GroupQueryAttention, `end` ending the names of what it returns. A layer with keys
        and values of another one finds them where that one has written them, and adds none."""
        config, kind = self._config, self._config.kind(layer)
        source, heads = config.kv_source(layer), config.heads(layer)
        prefix = f"model.layers.{layer}.self_attn."
        attended = nodes.add("Gather", [packed, "attention_rows"], prefix + "attended", axis=1)
        inputs = [attended, "", ""]
        if (config.qk_norm or self._parts(layer) != "qkv") and not self._is_stacked:
            inputs = self._normed_heads(inputs[0], layer, prefix)
        rotation, rotary = ["", "", ""], config.rotation(kind)
        if rotary is not None and not config.qk_norm_after_rope:
            rotation = [*self._rotations[rotary], "position_ids"]
        caches = [f"present.{layer}.{part}{end}" for part in ("key", "value")]
        past = [f"past.{layer}.key", f"past.{layer}.value"]
        if source != layer:
            caches, past = [], [f"present.{source}.key", f"present.{source}.value"]
        mixed = nodes.add(
            "GroupQueryAttention",
            [
                *inputs,
                *past,
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
            num_heads=heads.num_heads,
            kv_num_heads=heads.num_kv_heads,
            do_rotary=int(rotation[0] != ""),
            **self._score_attributes(),
        )
        output = nodes.add("Gather", [mixed, "kept_rows"], f"{prefix}output{end}", axis=1)
        return [output, *caches]

    def _score_attributes(self) -> dict[str, float]:
        """Returns what the operator makes of queries times keys, where it is not its own choice."""
        stated = {"scale": self._config.attention_scale, "softcap": self._config.attention_softcap}
        return {name: value for name, value in stated.items() if value is not None}

    def _normed_heads(self, packed: str, layer: int, prefix: str) -> list[str]:
        """Splits q, k and v and normalizes them as the model does, q and k in some models once they
        are rotated."""
        config = self._config
        parts = self._split(packed, layer, prefix)
        for part in "qk" if config.qk_norm else "":
            if part not in parts:
                continue
            name = f"{prefix}{part}"
            if config.qk_norm_after_rope:
                parts[part] = self._rotated(parts[part], layer, name)
            if config.qk_norm_whole:
                parts[part] = norm(
                    self._nodes, self._checkpoint, parts[part], name + "_norm", name + ".normed"
                )
            else:
                parts[part] = self._norm_each_head(parts[part], layer, name)
        if "v" in parts:
            if config.value_norm:
                parts["v"] = self._norm_each_head(parts["v"], layer, f"{prefix}v")
            return list(parts.values())
        kv_size = config.heads(layer).kv_size
        none = self._nodes.weights.add(f"no_keys_{kv_size}", np.zeros((1, 0, kv_size), np.float32))
        return [parts["q"], none, none]

    def _split(self, packed: str, layer: int, prefix: str) -> dict[str, str]:
        """Returns what a layer has of "qkv", each by itself, before any norm."""
        nodes, heads, parts = self._nodes, self._config.heads(layer), self._parts(layer)
        if parts == "q":
            return {"q": packed}
        sizes = [heads.query_size if part == "q" else heads.kv_size for part in parts]
        name = self._sized("qkv_sizes", layer) + ("" if parts == "qkv" else f".{parts}")
        split = {part: f"{prefix}{part}.split" for part in parts}
        constant = nodes.weights.add(name, np.array(sizes))
        nodes.add("Split", [packed, constant], list(split.values()), axis=-1)
        return split if "v" in split else split | {"v": split["k"]}

    def _sized(self, name: str, layer: int) -> str:
        """The name of a constant that depends on the sizes of a layer's heads."""
        kind = self._config.kind(layer)
        own = [kind.num_kv_heads, kind.head_dim]
        return name if own == [None, None] else f"{name}.{own[0]}.{own[1]}"

    def _rotated(self, x: str, layer: int, name: str) -> str:
        rotation = self._config.rotation(self._config.kind(layer))
        if rotation is None:
            return x
        inputs = [x, "position_ids", *self._rotations[rotation]]
        return self._nodes.add("RotaryEmbedding", inputs, name + ".rotated", domain=CONTRIB)

    def _norm_each_head(self, x: str, layer: int, name: str) -> str:
        nodes, head_dim = self._nodes, self._config.heads(layer).head_dim
        shape = np.array([1, 0, -1, head_dim])
        heads = nodes.weights.add(self._sized("head_shape", layer), shape)
        flat = nodes.weights.add("flat_shape", np.array([1, 0, -1]))
        split = nodes.add("Reshape", [x, heads], name + ".heads")
        if name.endswith(".v"):
            normed = self._unweighted(split, head_dim, name + ".normed")
        else:
            normed = norm(nodes, self._checkpoint, split, name + "_norm", name + ".normed")
        return nodes.add("Reshape", [normed, flat], name + ".flat")

    def _unweighted(self, x: str, size: int, output: str) -> str:
        """Normalization over the last axis, of this size, without a weight."""
        ones = self._nodes.weights.add(f"ones_{size}", np.ones(size, np.float32))
        epsilon = self._config.norm_epsilon
        return self._nodes.add(
            "SimplifiedLayerNormalization", [x, ones], output, axis=-1, epsilon=epsilon
        )
