"""Attention in two forms, one for prompts and one for the few rows of a round.

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
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes

STACKED = "stacked"
OPSET = 24  # TensorScatter
_MIN_KV_SIZE = 256  # of smaller ones GroupQueryAttention is as fast, and one node in place of 17

Attend = Callable[[Nodes, str], list[str]]


def pays(config: ModelConfig) -> bool:
    """Returns whether the graph gets both forms: query heads share keys, and those are large; of
    models without windows, caps and other features, which the stacked form does not have."""
    is_large = config.num_heads > config.num_kv_heads and config.kv_size >= _MIN_KV_SIZE
    return is_large and not config.features()


def inputs() -> list[ValueInfoProto]:
    return [
        helper.make_tensor_value_info(STACKED, TensorProto.BOOL, [1]),
        helper.make_tensor_value_info("cached_tokens", TensorProto.INT64, [1]),
    ]


def either(nodes: Nodes, attend: Attend, grouped: Attend, outputs: list[str]) -> str:
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


def attention(nodes: Nodes, config: ModelConfig, packed: str, layer: int, end: str) -> list[str]:
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
