"""Writes what a decoder's graph has besides where an encoder stands before it.

    cross.N.key|value    [1, heads, source, head_dim]    of the source, fixed for all passes of it

Relative positions are added to `attention_bias`, from `position_ids`: a row of a tree has the
distances that it would have in its path.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.onnx.attention import attention_biases, output_bias
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes, distances
from edge_spec.exporters.onnx.weights import OnnxWeights


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
