"""The layers of an EAGLE head as one graph, which scores rows and writes their keys and values.

Inputs and outputs (rows: entries made in this pass, total: entries before them and they):

    embedded               [1, rows, hidden]        of the tokens
    found                  [1, known, features]     the target's features of some rows
    replaced               [1, rows - known, hidden]  the states that take their place in the others
    order                  [rows] int64             which of these each row has
    position_ids           [1, rows] int64
    cos, sin               [positions, rotated / 2]
    attention_bias         [1, 1, rows, total]      0 where a row sees an entry, -inf elsewhere
    seqlens_k              [1] int32                total - 1
    total_sequence_length  scalar int32             total
    logit_rows             [scored] int64           the rows that are scored
    past.N.key|value       [1, kv_heads, capacity, head_dim]
    present.N.key|value    the same buffers
    states                 [1, rows, hidden]        what the next rows go on from
    logits                 [1, scored, scored tokens]

A row sees none of the rows after it: the operator masks them by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
from onnx import TensorProto, ValueInfoProto

from edge_spec.core.heads import EagleHead, HeadMatrix
from edge_spec.exporters.heads.layers_graph import LayersGraph
from edge_spec.exporters.onnx.graph import tensor
from edge_spec.exporters.onnx.nodes import CONTRIB


class EagleGraph(LayersGraph):
    def __init__(
        self, head: EagleHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
    ) -> None:
        super().__init__(head, matrices, bits, weights)
        self._head = head

    def built(self) -> bytes:
        """Returns a serialized ModelProto, whose weights are written."""
        stream, read = self._enter()
        for layer in range(self._config.num_layers):
            if layer:
                read = self._norm(stream, f"layers.{layer}.input_norm")
            stream = self._leave(stream, self._attend(read, layer), layer)
        self._score(stream)
        return self._graph.serialized("head", self._inputs(), self._outputs())

    def _enter(self) -> tuple[str, str]:
        """Returns what the first layer adds to, and what its attention reads."""
        graph = self._graph
        both = graph.add("Concat", [self._known(), "replaced"], "unordered", axis=1)
        features = graph.add("Gather", [both, "order"], "features", axis=1)
        if self._head.joins_embedding:
            embedded = self._norm("embedded", "embed_norm")
            beside = [embedded, self._norm(features, "state_norm")]
            stream = self._multiply(graph.add("Concat", beside, "beside", axis=-1), "fc")
            return stream, self._norm(stream, "layers.0.input_norm")
        normed = self._norm(features, "layers.0.hidden_norm")
        beside = [self._norm("embedded", "layers.0.input_norm"), normed]
        stream = normed if self._head.adds_to_normed else features
        return stream, graph.add("Concat", beside, "beside", axis=-1)

    def _known(self) -> str:
        """Returns what features that were found enter as, [1, known, hidden]."""
        if self._head.joins_embedding:
            return "found"
        normed, count = "found", len(self._head.feature_layers)
        if "feature_norm.0" in self._norms:
            parts = [f"found.{index}" for index in range(count)]
            self._graph.add("Split", ["found"], parts, axis=-1, num_outputs=count)
            each = [self._norm(part, f"feature_norm.{i}") for i, part in enumerate(parts)]
            normed = self._graph.add("Concat", each, "found.normed", axis=-1)
        return self._multiply(self._norm(normed, "fc_norm"), "fc")

    def _attend(self, read: str, layer: int) -> str:
        config, graph, prefix = self._config, self._graph, f"layers.{layer}."
        sizes = [config.query_size, config.kv_size, config.kv_size]
        parts = [prefix + each for each in "qkv"]
        gate = prefix + "q_gate"
        if is_gated := f"{gate}.weight" in self._tensors:
            sizes, parts = [*sizes, config.query_size], [*parts, gate]
        packed = self._multiply(read, prefix + "qkv")
        graph.add("Split", [packed, graph.weight("qkv_sizes", np.array(sizes))], parts, axis=-1)
        turned = [
            self._turned(prefix + part, count, "position_ids")
            for part, count in (("q", config.num_heads), ("k", config.num_kv_heads))
        ]
        past, present = (
            [f"{when}.{layer}.{part}" for part in ("key", "value")] for when in ("past", "present")
        )
        lengths = ["seqlens_k", "total_sequence_length"]
        inputs = [*turned, parts[2], *past, *lengths, "", "", "", "attention_bias"]
        mixed = graph.add(
            "GroupQueryAttention",
            inputs,
            [prefix + "mixed", *present],
            domain=CONTRIB,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
        )
        if not is_gated:
            return mixed
        opened = graph.add("Sigmoid", [gate], gate + ".opened")
        return graph.add("Mul", [mixed, opened], prefix + "gated")

    def _score(self, stream: str) -> None:
        graph = self._graph
        normed = self._norm(stream, "norm")
        goes_on = normed if self._head.returns_normed else stream
        graph.add("Identity", [goes_on], "states")
        picked = graph.add("Gather", [normed, "logit_rows"], "scored", axis=1)
        self._multiply(picked, "head", "logits")

    def _inputs(self) -> list[ValueInfoProto]:
        kinds, size = TensorProto, self._config.hidden_size
        return [
            tensor("embedded", kinds.FLOAT, [1, "rows", size]),
            tensor("found", kinds.FLOAT, [1, "known", "features"]),
            tensor("replaced", kinds.FLOAT, [1, "others", size]),
            tensor("order", kinds.INT64, ["rows"]),
            tensor("position_ids", kinds.INT64, [1, "rows"]),
            *self._tables(),
            tensor("attention_bias", kinds.FLOAT, [1, 1, "rows", "total"]),
            tensor("seqlens_k", kinds.INT32, [1]),
            tensor("total_sequence_length", kinds.INT32, []),
            tensor("logit_rows", kinds.INT64, ["scored"]),
            *self._keys_values("past", "capacity"),
        ]

    def _outputs(self) -> list[ValueInfoProto]:
        return [
            tensor("states", TensorProto.FLOAT, [1, "rows", self._config.hidden_size]),
            tensor("logits", TensorProto.FLOAT, [1, "scored", "tokens"]),
            *self._keys_values("present", "capacity"),
        ]
