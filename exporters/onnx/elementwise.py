"""Nodes that a description asks for beside matrices, norms and attention."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes


def times(nodes: Nodes, x: str, scale: float, output: str) -> str:
    """x * scale as `output`; x itself for a scale of 1."""
    return x if scale == 1.0 else nodes.add("Mul", [x, _scalar(nodes, scale)], output)


def softcap(nodes: Nodes, x: str, cap: float, output: str) -> str:
    """Keeps x between -cap and cap: cap * tanh(x / cap)."""
    small = nodes.add("Div", [x, _scalar(nodes, cap)], output + ".small")
    return nodes.add(
        "Mul", [nodes.add("Tanh", [small], output + ".tanh"), _scalar(nodes, cap)], output
    )


def activation(nodes: Nodes, gate: str, name: str, prefix: str) -> str:
    """name: one of edge_spec.core.config.ACTIVATIONS."""
    if name == "relu":
        return nodes.add("Relu", [gate], prefix + "relu")
    if name == "gelu":
        return nodes.add("Gelu", [gate], prefix + "gelu")
    if name == "gelu_tanh":
        return nodes.add("FastGelu", [gate], prefix + "gelu", domain=CONTRIB)
    return nodes.add("QuickGelu", [gate], prefix + "swish", domain=CONTRIB, alpha=1.0)


def window_bias(nodes: Nodes, window: int) -> str:
    """`attention_bias` that lets a row see `window` positions at most, its own included."""
    prefix = f"window.{window}."
    distance = distances(nodes, prefix)
    limit = nodes.weights.add(f"window_{window}", np.array(window, np.int32))
    near = nodes.add("Less", [distance, limit], prefix + "near")
    never = nodes.weights.add("never", np.array(-np.inf, np.float32))
    return nodes.add("Where", [near, "attention_bias", never], prefix + "bias")


def distances(nodes: Nodes, prefix: str) -> str:
    """[attended, total] int32: how far each row stands after what it may attend to.

    Cached tokens stand at their positions, the rows of the pass after them at `position_ids`.
    """

    def constant(name: str, value: int, kind: type = np.int32) -> str:
        return nodes.weights.add(name, np.array(value, kind))

    wide = nodes.add("Squeeze", ["position_ids"], prefix + "wide")
    rows = nodes.add("Cast", [wide], prefix + "rows", to=TensorProto.INT32)
    count = nodes.add("Size", [rows], prefix + "count64")
    count = nodes.add("Cast", [count], prefix + "count", to=TensorProto.INT32)
    past = nodes.add("Sub", ["total_sequence_length", count], prefix + "past")
    ends = [constant("range_start", 0), past, constant("range_step", 1)]
    cached = nodes.add("Range", ends, prefix + "cached")
    positions = nodes.add("Concat", [cached, rows], prefix + "positions", axis=0)
    column = nodes.add("Unsqueeze", [rows, constant("last_axis", -1, np.int64)], prefix + "column")
    return nodes.add("Sub", [column, positions], prefix + "distance")


def _scalar(nodes: Nodes, value: float) -> str:
    return nodes.weights.add(f"scalar_{value!r}", np.array(value, np.float32))
