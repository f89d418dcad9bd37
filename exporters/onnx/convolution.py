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

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx.nodes import Nodes
from edge_spec.exporters.onnx.weights import OnnxWeights

OPSET = 24  # TensorScatter
ANCESTORS = "ancestors"


def inputs(config: ModelConfig) -> list[ValueInfoProto]:
    counts: list[int | str] = [config.num_preceding, "attended"]
    return [
        helper.make_tensor_value_info("cached_tokens", TensorProto.INT64, [1]),
        helper.make_tensor_value_info(ANCESTORS, TensorProto.INT64, counts),
    ]


def cache_shape(config: ModelConfig) -> list[int | str]:
    return [1, 1, "slots", config.hidden_size]


def nearest_first(nodes: Nodes, config: ModelConfig) -> list[str]:
    """`ancestors` apart, each [attended]: once for all layers."""
    ones = nodes.weights.add("one_each", np.ones(config.num_preceding, np.int64))
    found = [f"{ANCESTORS}.{distance}" for distance in range(config.num_preceding)]
    nodes.add("Split", [ANCESTORS, ones], found, axis=0)
    first = nodes.weights.add("first_axis", np.array([0]))
    return [nodes.add("Squeeze", [name, first], name + ".rows") for name in found]


class Convolution:
    """Adds those of one layer after another. ancestors: as `nearest_first` gives them."""

    def __init__(
        self, nodes: Nodes, weights: OnnxWeights, checkpoint: StoredCheckpoint, ancestors: list[str]
    ) -> None:
        self._nodes, self._weights, self._checkpoint = nodes, weights, checkpoint
        self._ancestors = ancestors

    def add(self, x: str, layer: int) -> str:
        """x: [1, rows, hidden] -> the same."""
        nodes, prefix = self._nodes, f"model.layers.{layer}.conv."
        joined = self._weights.linear(x, [prefix + "in_proj.weight"], [])
        parts = [prefix + part for part in ("enters", "leaves", "values")]
        nodes.add("Split", [joined], parts, axis=-1, num_outputs=3)
        gated = nodes.add("Mul", [parts[0], parts[2]], prefix + "gated")
        attended = nodes.add("Gather", [gated, "attention_rows"], prefix + "attended", axis=1)
        convolved = self._convolved(attended, layer, prefix)
        kept = nodes.add("Gather", [convolved, "kept_rows"], prefix + "kept", axis=1)
        product = nodes.add("Mul", [parts[1], kept], prefix + "product")
        return self._weights.linear(product, [prefix + "out_proj.weight"], [])

    def _convolved(self, rows: str, layer: int, prefix: str) -> str:
        """rows: [1, attended, hidden] -> the same; writes them to the cache."""
        nodes = self._nodes
        first = nodes.weights.add("first_axis", np.array([0]))
        update = nodes.add("Unsqueeze", [rows, first], prefix + "update")
        present = nodes.add(
            "TensorScatter",
            [f"past.{layer}.gated", update, "cached_tokens"],
            f"present.{layer}.gated",
            axis=2,
        )
        kernel = self._checkpoint.float32(prefix + "conv.weight").T  # the row's own last
        taps = [
            nodes.weights.add(f"{prefix}tap.{distance}", np.ascontiguousarray(tap))
            for distance, tap in enumerate(kernel[::-1])
        ]
        total = nodes.add("Mul", [update, taps[0]], prefix + "own")
        ancestors = self._ancestors[: len(taps) - 1]
        for distance, (indices, tap) in enumerate(zip(ancestors, taps[1:], strict=True), start=1):
            name = f"{prefix}before.{distance}"
            before = nodes.add("Gather", [present, indices], name, axis=2)
            term = nodes.add("Mul", [before, tap], name + ".term")
            total = nodes.add("Add", [total, term], name + ".total")
        return nodes.add("Squeeze", [total, first], prefix + "convolved")
