"""Attention of standard operators over a cache that the graph reads and does not write.

Each row attends to the slots of the cache and to the rows of its own pass, whose keys and values
the graph returns: `present.N.key|value` [1, kv_heads, rows, head_dim]. Scores of the two are put
side by side before the softmax, so that no key is moved: the operator that OpenVINO has for it
returns past and rows together, a copy of the whole cache in every pass.

`attention_bias` is [1, 1, rows, slots + rows]: 0 where a row sees a slot or a row, else -inf. The
query heads that share keys are stacked as rows of one matrix, [group * rows, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper

from edge_spec.core.config import ModelConfig

_END = np.iinfo(np.int64).max


class Attention:
    """shared: nodes that all layers read, to stand before the others."""

    def __init__(self, graph: GraphProto, config: ModelConfig) -> None:
        self._graph = graph
        self._config = config
        self._constants: set[str] = set()
        self.shared: list[NodeProto] = []
        shape = self._share("Shape", ["past.0.key"], "cache_shape")
        self._slots = self._share("Gather", [shape, self._constant([2])], "cache_slots")
        self._tables: dict[str, str] = {}

    def replace(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yields the nodes that compute a GroupQueryAttention node, under the same names."""
        made = _Layer(node, self._config, self._constant, self._slots)
        told = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        query, key, value = made.heads(node.input[:3])
        if told.get("do_rotary"):
            angles = [self._angles(node.input[at], node.input[9]) for at in (7, 8)]
            query, key = made.rotate(query, angles, "q"), made.rotate(key, angles, "k")
        made.add("Transpose", [key], node.output[1], perm=[0, 2, 1, 3])
        made.add("Transpose", [value], node.output[2], perm=[0, 2, 1, 3])
        sinks = node.input[11] if len(node.input) > 11 else ""
        scores = made.score(query, told.get("scale"), told.get("softcap"))
        made.mix(scores, node.input[10], sinks)
        yield from made.nodes

    def _angles(self, table: str, positions: str) -> str:
        """Returns cosines or sines of a pass's rows, [1, rows, 1, half of what is rotated]."""
        if table not in self._tables:
            taken = self._share("Gather", [table, positions], f"{table}.taken")
            inputs = [taken, self._constant([2])]
            self._tables[table] = self._share("Unsqueeze", inputs, f"{table}.rows")
        return self._tables[table]

    def _share(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.shared.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    def _constant(self, values: Any, kind: type = np.int64) -> str:
        array: np.ndarray = np.array(values, kind)
        name = f"constant.{array.dtype}.{array.shape}.{array.tolist()}"
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name


class _Layer:
    """The nodes of one layer, as they are added."""

    def __init__(self, node: NodeProto, config: ModelConfig, constant: Any, slots: str) -> None:
        self.nodes: list[NodeProto] = []
        self._node, self._config = node, config
        self._constant, self._slots = constant, slots
        self._prefix = node.output[0]

    def add(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def heads(self, inputs: Any) -> list[str]:
        """Returns queries, keys and values, [1, rows, heads, head_dim] each."""
        config = self._config
        packed, *others = inputs
        shape = self._constant([1, 0, -1, config.head_dim])
        if any(others):
            return [self.add("Reshape", [each, shape]) for each in inputs]
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        apart = self.add("Reshape", [packed, shape])
        return self._split(apart, sizes, axis=2)

    def rotate(self, x: str, angles: list[str], name: str) -> str:
        """Turns the first `rotated` elements of each head, as half and half."""
        config = self._config
        half, rest = config.rotated // 2, config.head_dim - config.rotated
        first, second, *kept = self._split(x, [half, half, *([rest] if rest else [])], axis=3)
        cos, sin = angles
        left = self.add("Sub", [self.add("Mul", [first, cos]), self.add("Mul", [second, sin])])
        right = self.add("Add", [self.add("Mul", [second, cos]), self.add("Mul", [first, sin])])
        return self.add("Concat", [left, right, *kept], f"{self._prefix}.{name}", axis=3)

    def score(self, query: str, scale: float | None, cap: float | None) -> str:
        """Returns [1, kv_heads, group * rows, slots + rows]."""
        config = self._config
        by_head = self.add("Transpose", [query], perm=[0, 2, 1, 3])
        factor = self._constant(scale or config.head_dim**-0.5, np.float32)
        scaled = self.add("Mul", [by_head, factor])
        shape = self._constant([1, config.num_kv_heads, -1, config.head_dim])
        stacked = self.add("Reshape", [scaled, shape])
        parts = []
        for keys in (self._node.input[3], self._node.output[1]):
            turned = self.add("Transpose", [keys], perm=[0, 1, 3, 2])
            parts.append(self.add("MatMul", [stacked, turned]))
        scores = self.add("Concat", parts, axis=3)
        if not cap:
            return scores
        limit = self._constant(cap, np.float32)
        return self.add("Mul", [self.add("Tanh", [self.add("Div", [scores, limit])]), limit])

    def mix(self, scores: str, bias: str, sinks: str) -> None:
        """Adds the rest of the node, from scores to what it returns for each row."""
        config = self._config
        masked = self.add("Add", [self._regroup(scores, config.num_heads), bias])
        weights = self._softmax(masked, sinks)
        grouped = self._regroup(weights, config.num_kv_heads)
        zero, last, axis = self._constant([0]), self._constant([_END]), self._constant([3])
        mixed = []
        for start, end, values in (
            (zero, self._slots, self._node.input[4]),
            (self._slots, last, self._node.output[2]),
        ):
            part = self.add("Slice", [grouped, start, end, axis])
            mixed.append(self.add("MatMul", [part, values]))
        both = self.add("Add", mixed)
        shape = self._constant([1, config.num_heads, -1, config.head_dim])
        by_row = self.add("Transpose", [self.add("Reshape", [both, shape])], perm=[0, 2, 1, 3])
        flat = self._constant([1, -1, config.query_size])
        self.add("Reshape", [by_row, flat], self._node.output[0])

    def _softmax(self, masked: str, sinks: str) -> str:
        if not sinks:
            return self.add("Softmax", [masked], axis=3)
        by_head = self._constant([1, self._config.num_heads, 1, 1])
        rows = self.add("Concat", [self.add("Shape", [masked], end=3), self._constant([1])], axis=0)
        column = self.add("Expand", [self.add("Reshape", [sinks, by_head]), rows])
        whole = self.add("Softmax", [self.add("Concat", [masked, column], axis=3)], axis=3)
        return self.add("Slice", [whole, *(self._constant([at]) for at in (0, -1, 3))])

    def _regroup(self, x: str, heads: int) -> str:
        """The columns are all that stand in a row: [1, heads, rows of a head, columns]."""
        columns = self.add("Shape", [x], start=3, end=4)
        sizes = [self._constant([1, heads, -1]), columns]
        return self.add("Reshape", [x, self.add("Concat", sizes, axis=0)])

    def _split(self, x: str, sizes: list[int], axis: int) -> list[str]:
        names = [f"{self._prefix}.{len(self.nodes)}.{at}" for at in range(len(sizes))]
        inputs = [x, self._constant(sizes)]
        self.nodes.append(helper.make_node("Split", inputs, names, names[0], axis=axis))
        return names
