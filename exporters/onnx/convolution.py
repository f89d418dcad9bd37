"""A gated short convolution over each element by itself, in the place of attention (LFM2).

What it takes in is cached for every token, as keys are, so that rows of a tree, commits and
rollbacks are the cache's own. Inputs and outputs that graphs with convolutions have besides:

    cached_tokens    [1] int64                    where the cache is written
    ancestors        [preceding, attended] int64  where the row before each attended row is cached,
                                                  the one before that, ...; -1 before the text
    past.N.gated     [1, 1, slots, hidden]
    present.N.gated  the same buffers

The last slot is never written: it is zeros, and what -1 finds. Rows are multiplied and added one by
one, in an order that is always the same, so that no row's bits depend on how many there are. They
pass through `attention_rows` and `kept_rows` as those of attention do, between which a graph is
repeated for conversations that share a pass (runtimes/ort/joint_graph.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, ValueInfoProto

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.onnx.emitter import Emitter
from edge_spec.exporters.onnx.nodes import tensor

OPSET = 24  # TensorScatter
ANCESTORS = "ancestors"


def inputs(config: ModelConfig) -> list[ValueInfoProto]:
    return [
        tensor("cached_tokens", TensorProto.INT64, [1]),
        tensor(ANCESTORS, TensorProto.INT64, [config.num_preceding, "attended"]),
    ]


def cache_shape(config: ModelConfig) -> list[int | str]:
    return [1, 1, "slots", config.hidden_size]


def nearest_first(graph: Emitter) -> list[str]:
    """`ancestors` apart, each [attended]: once for all layers."""
    count = graph.config.num_preceding
    ones = graph.weights.add("one_each", np.ones(count, np.int64))
    found = [f"{ANCESTORS}.{distance}" for distance in range(count)]
    graph.add("Split", [ANCESTORS, ones], found, axis=0)
    first = graph.constant("first_axis", [0])
    return [graph.add("Squeeze", [name, first], name + ".rows") for name in found]


def convolution(graph: Emitter, x: str, layer: int, ancestors: Sequence[str]) -> str:
    """x: [1, rows, hidden] -> the same; ancestors: as `nearest_first` gives them."""
    prefix = f"model.layers.{layer}.conv."
    joined = graph.linear(x, prefix, ["in_proj"])
    parts = [prefix + part for part in ("enters", "leaves", "values")]
    graph.add("Split", [joined], parts, axis=-1, num_outputs=3)
    gated = graph.add("Mul", [parts[0], parts[2]], prefix + "gated")
    attended = graph.add("Gather", [gated, "attention_rows"], prefix + "attended", axis=1)
    convolved = _convolved(graph, attended, layer, ancestors)
    kept = graph.add("Gather", [convolved, "kept_rows"], prefix + "kept", axis=1)
    product = graph.add("Mul", [parts[1], kept], prefix + "product")
    return graph.linear(product, prefix, ["out_proj"])


def _convolved(graph: Emitter, rows: str, layer: int, ancestors: Sequence[str]) -> str:
    """rows: [1, attended, hidden] -> the same; writes them to the cache."""
    prefix, first = f"model.layers.{layer}.conv.", graph.constant("first_axis", [0])
    update = graph.add("Unsqueeze", [rows, first], prefix + "update")
    cache = [f"past.{layer}.gated", update, "cached_tokens"]
    present = graph.add("TensorScatter", cache, f"present.{layer}.gated", axis=2)
    kernel = graph.checkpoint.float32(prefix + "conv.weight").T  # the row's own last
    taps = [
        graph.weights.add(f"{prefix}tap.{distance}", np.ascontiguousarray(tap))
        for distance, tap in enumerate(kernel[::-1])
    ]
    total = graph.add("Mul", [update, taps[0]], prefix + "own")
    for distance, tap in enumerate(taps[1:], start=1):
        name = f"{prefix}before.{distance}"
        before = graph.add("Gather", [present, ancestors[distance - 1]], name, axis=2)
        term = graph.add("Mul", [before, tap], name + ".term")
        total = graph.add("Add", [total, term], name + ".total")
    return graph.add("Squeeze", [total, first], prefix + "convolved")
