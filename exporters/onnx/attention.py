"""Attention of a layer and norms: GroupQueryAttention, or one of two forms, one for prompts and one
for the few rows of a round.

onnxruntime's GroupQueryAttention arranges the keys and values of all cached tokens for its
kernels once more in every pass, and for each query head. In long texts that costs more than the
attention itself. Where a pass has few rows, the query heads that share keys are therefore stacked
as rows of one matrix, [group * rows, head_dim] for each key head, and the keys are the *left*
factor of its product, which is read where it lies. Values are arranged once for a key head.

A single row has `group` rows then, so that the same kernel takes it as takes the rows of wider
passes: none has to be attended twice, and its result is the same bit for bit. The cache may be
longer than the text: what the mask hides is added as zero.

Two more inputs than the graph has otherwise (exporters/onnx/graph.py), and another mask:

    stacked          [1] bool     which form this pass takes
    cached_tokens    [1] int64    where the cache is written, of a stacked pass
    attention_bias   [1, 1, rows, capacity] of a stacked pass: -inf beyond its own rows, too

What only the other form reads is not looked at in a stacked pass, and `position_ids` has a
position for each row. The rows of a prompt are too many to be stacked: their scores of all cached
tokens would take hundreds of megabytes.

Where an encoder stands before it, a decoder's graph attends to its source besides:

    cross.N.key|value    [1, heads, source, head_dim]    of the source, fixed for all passes of it

Relative positions are added to `attention_bias`, from `position_ids`: a row of a tree has the
distances that it would have in its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Rotation
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes, distances
from edge_spec.exporters.onnx.weights import OnnxWeights

STACKED = "stacked"
STACKED_OPSET = 24  # TensorScatter
_MIN_KV_SIZE = 256  # of smaller ones GroupQueryAttention is as fast, and one node in place of 17

Attend = Callable[[Nodes, str], list[str]]


def pays_to_stack(config: ModelConfig) -> bool:
    """Returns whether the graph gets both forms: query heads share keys, those are large, and the
    model has nothing that Llama does not have, such as windows or caps."""
    shares_large = config.num_heads > config.num_kv_heads and config.kv_size >= _MIN_KV_SIZE
    return shares_large and not config.features()


def stacked_inputs() -> list[ValueInfoProto]:
    return [
        helper.make_tensor_value_info(STACKED, TensorProto.BOOL, [1]),
        helper.make_tensor_value_info("cached_tokens", TensorProto.INT64, [1]),
    ]


def either_form(nodes: Nodes, attend: Attend, grouped: Attend, outputs: list[str]) -> str:
    """Adds an `If` of two forms, each of which adds its nodes, with the end that it is given on
    their names, and returns names for `outputs`: what the rows get, keys and values."""

    def branch(form: Attend, name: str) -> GraphProto:
        inner = Nodes(nodes.weights)
        found = [
            helper.make_tensor_value_info(each, TensorProto.FLOAT, None)
            for each in form(inner, f".{name}")
        ]
        return helper.make_graph(inner.protos, f"{outputs[0]}.{name}", [], found)

    return nodes.add(
        "If",
        [STACKED],
        outputs,
        then_branch=branch(attend, "stacked"),
        else_branch=branch(grouped, "grouped"),
    )


def stacked_attention(
    nodes: Nodes, config: ModelConfig, packed: str, layer: int, end: str
) -> list[str]:
    """Adds the stacked form over `packed`, [1, rows, q, k and v side by side]."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    constant = nodes.weights.add
    split_size = constant("head_shape", np.array([1, 0, -1, config.head_dim]))

    def add(op: str, tensors: list[str], name: str, domain: str = "", **attributes: object) -> str:
        return nodes.add(op, tensors, f"{packed}.{name}{end}", domain, **attributes)

    def reshaped(tensor: str, name: str, shape: list[int]) -> str:
        return add("Reshape", [tensor, constant(f"{name}_shape", np.array(shape))], name)

    def split(tensor: str, sizes: list[int], names: list[str]) -> list[str]:
        parts = [f"{packed}.{name}{end}" for name in names]
        chosen = constant(f"{'_'.join(names)}_sizes", np.array(sizes))
        nodes.add("Split", [tensor, chosen], parts, axis=1)
        return parts

    by_row = add("Reshape", [packed, split_size], "by_row")
    by_head = add("Transpose", [by_row], "by_head", perm=[0, 2, 1, 3])
    turning, value = split(by_head, [heads + kv_heads, kv_heads], ["turning", "value"])
    turned = add(
        "RotaryEmbedding", [turning, "position_ids", "rope_cos", "rope_sin"], "turned", CONTRIB
    )
    query, key = split(turned, [heads, kv_heads], ["query", "key"])
    keys, values = (
        nodes.add(
            "TensorScatter",
            [f"past.{layer}.{part}", rows, "cached_tokens"],
            f"present.{layer}.{part}{end}",
            axis=2,
        )
        for part, rows in (("key", key), ("value", value))
    )
    # Heads of one group follow each other, so stacking them moves nothing.
    stacked = reshaped(query, "stacked_query", [1, kv_heads, -1, config.head_dim])
    scale = config.head_dim**-0.5
    columns = add("FusedMatMul", [keys, stacked], "columns", CONTRIB, transB=1, alpha=scale)
    scores = add("Transpose", [columns], "scores", perm=[0, 1, 3, 2])
    masked = add("Add", [reshaped(scores, "head_scores", [1, heads, -1, 0]), "attention_bias"], "m")
    weights = add("Softmax", [masked], "weights", axis=-1)
    mixed = add("MatMul", [reshaped(weights, "group_weights", [1, kv_heads, -1, 0]), values], "mix")
    apart = reshaped(mixed, "head_mix", [1, heads, -1, config.head_dim])
    rows = add("Transpose", [apart], "row_mix", perm=[0, 2, 1, 3])
    return [reshaped(rows, "output", [1, 0, -1]), keys, values]


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
        self._is_stacked = pays_to_stack(checkpoint.config)

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
            output = either_form(
                nodes,
                lambda inner, end: stacked_attention(inner, config, packed, layer, end),
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


def relative_bias(nodes: Nodes, config: ModelConfig, weight: np.ndarray) -> str:
    """`attention_bias` with what each head adds, [1, heads, attended, total]. weight: [buckets,
    heads] float32."""
    relative = config.relative_positions
    assert relative is not None
    distance = distances(nodes, "relative.")
    far = nodes.weights.add("relative.far", np.array(relative.max_distance, np.int32))
    after = nodes.add("Sub", [far, distance], "relative.after")
    bias = head_bias(nodes, "relative.", after, weight[relative.buckets(both_ways=False)])
    return nodes.add("Add", [bias, "attention_bias"], "relative.bias")


def head_bias(nodes: Nodes, prefix: str, after: str, table: np.ndarray) -> str:
    """[1, heads, rows, keys] of the rows of `table` [2 * max_distance + 1, heads]. after: name of
    [rows, keys] int32, how far each key stands after its query, plus max_distance."""
    lowest = nodes.weights.add(prefix + "nearest", np.array(0, np.int32))
    highest = nodes.weights.add(prefix + "farthest", np.array(len(table) - 1, np.int32))
    index = nodes.add("Clip", [after, lowest, highest], prefix + "index")
    stored = nodes.weights.add(prefix + "table", table.astype(np.float32))
    found = nodes.add("Gather", [stored, index], prefix + "found", axis=0)
    heads = nodes.add("Transpose", [found], prefix + "heads", perm=[2, 0, 1])
    first = nodes.weights.add("first_axis", np.array([0]))
    return nodes.add("Unsqueeze", [heads, first], prefix + "by_head")


def cross_attention(
    nodes: Nodes, weights: OnnxWeights, config: ModelConfig, x: str, layer: int
) -> str:
    """Returns what attention to the source adds to the normed residual stream `x`.

    A single row is attended twice here, too (graph.py).
    """
    prefix = f"model.layers.{layer}.cross_attn."
    queries = weights.linear(x, [prefix + "q_proj.weight"], attention_biases(config, prefix, "q"))
    attended = nodes.add("Gather", [queries, "attention_rows"], prefix + "attended", axis=1)
    mixed = nodes.add(
        "MultiHeadAttention",
        [attended, *(f"cross.{layer}.{part}" for part in ("key", "value"))],
        prefix + "mixed",
        domain=CONTRIB,
        num_heads=config.num_heads,
        scale=attention_scale(config),
    )
    output = nodes.add("Gather", [mixed, "kept_rows"], prefix + "output", axis=1)
    return weights.linear(output, [prefix + "o_proj.weight"], output_bias(config, prefix))


def attention_scale(config: ModelConfig) -> float:
    scale = config.attention_scale
    return float(config.head_dim) ** -0.5 if scale is None else scale


def source_values(config: ModelConfig) -> list[ValueInfoProto]:
    """The keys and values of a source, which the encoder's graph makes and the decoder's reads."""
    shape: list[int | str] = [1, config.num_heads, "source", config.head_dim]
    return [
        helper.make_tensor_value_info(f"cross.{layer}.{part}", TensorProto.FLOAT, shape)
        for layer in range(config.num_layers)
        for part in ("key", "value")
    ]
