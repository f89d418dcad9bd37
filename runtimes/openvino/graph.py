"""Makes a bundle's graph into what OpenVINO reads, over the bundle's own file of weights.

- Every weight becomes a node `Weight`, which OpenVINO's frontend is told to make a constant of
  that lies where the file is mapped: graphs given as bytes may not name files elsewhere.
- Where attention or experts stand in two forms for the sake of onnxruntime's CPU, the general one
  is kept.
- GroupQueryAttention becomes standard operators, which do not write the cache.
- The embedding's rows are taken before they are widened.

In that attention each row attends to the slots of the cache and to the rows of its own pass, whose
keys and values the graph returns: `present.N.key|value` [1, kv_heads, rows, head_dim]. Scores of
the two are put side by side before the softmax, so that no key is moved: the operator that OpenVINO
has for it returns past and rows together, a copy of the whole cache in every pass.

`attention_bias` is [1, 1, rows, slots + rows]: 0 where a row sees a slot or a row, else -inf. The
query heads that share keys are stacked as rows of one matrix, [group * rows, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from edge_spec.core.config import ModelConfig
from edge_spec.errors import UnsupportedModelError
from edge_spec.runtimes.onnx_nodes import (
    ATTENTION_ROWS,
    attend_once,
    drop_unread,
    keep_general_forms,
    set_nodes,
)

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


DOMAIN, WEIGHT = "edge_spec", "Weight"
_UNREAD = {*ATTENTION_ROWS, "seqlens_k", "total_sequence_length", "stacked", "cached_tokens"}


@dataclass(frozen=True)
class Rewritten:
    """A serialized ModelProto, and what its nodes `Weight` stand for, by name, mapped from the
    file."""

    graph: bytes
    weights: dict[str, np.ndarray]


def rewrite(path: Path, config: ModelConfig) -> Rewritten:
    """Raises UnsupportedModelError for a form of weights that OpenVINO is not given."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    keep_general_forms(model)
    attend_once(graph)
    attention = Attention(graph, config)
    nodes = [made for node in graph.node for made in _replaced(graph, node, attention)]
    set_nodes(graph, [*attention.shared, *nodes])
    _name_own_rows(graph)
    _drop_unread(graph)
    weights = _mapped(graph, path)
    stated = [
        helper.make_node(WEIGHT, [], [name], name, domain=DOMAIN, key=name) for name in weights
    ]
    set_nodes(graph, [*stated, *graph.node])
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return Rewritten(bytes(model.SerializeToString()), weights)


def _replaced(graph: GraphProto, node: NodeProto, attention: Attention) -> Iterator[NodeProto]:
    if node.op_type == "GroupQueryAttention":
        yield from attention.replace(node)
    elif node.op_type == "GatherBlockQuantized":
        yield from _taken_rows(graph, node)
    else:
        yield node


def _taken_rows(graph: GraphProto, node: NodeProto) -> Iterator[NodeProto]:
    """Yields what takes rows of a matrix of bytes, whose blocks have a scale each, and a zero
    point, which is 128 where none is stated."""
    packed, ids, scales, *zeros = node.input
    bits = next(each.i for each in node.attribute if each.name == "bits")
    if bits != 8:
        raise UnsupportedModelError(
            f"openvino is not given an embedding of {bits} bits", remedy="Choose --runtime ort."
        )
    flat = next(each for each in graph.node if each.output[0] == packed)  # its Reshape
    table = next(each for each in graph.initializer if each.name == flat.input[0])
    _, blocks, size = table.dims
    output = node.output[0]
    for name, value in (
        ("zero", np.array(128, np.float32)),
        ("last", np.array([-1])),
        ("shape", np.array([1, -1, blocks * size])),
        ("by_block", np.array([1, -1, blocks, size])),
    ):
        graph.initializer.append(numpy_helper.from_array(value, f"{output}.{name}"))
    yield _node("Gather", [flat.input[0], ids], f"{output}.taken", axis=0)
    yield _node("Reshape", [f"{output}.taken", f"{output}.by_block"], f"{output}.split")
    yield _node("Cast", [f"{output}.split"], f"{output}.wide", to=TensorProto.FLOAT)
    zero = f"{output}.zero"
    if zeros:
        zero = f"{output}.zeros"
        yield _node("Gather", [zeros[0], ids], f"{zero}.taken", axis=0)
        yield _node("Unsqueeze", [f"{zero}.taken", f"{output}.last"], f"{zero}.column")
        yield _node("Cast", [f"{zero}.column"], zero, to=TensorProto.FLOAT)
    yield _node("Sub", [f"{output}.wide", zero], f"{output}.centred")
    yield _node("Gather", [scales, ids], f"{output}.scales", axis=0)
    yield _node("Unsqueeze", [f"{output}.scales", f"{output}.last"], f"{output}.column")
    yield _node("Mul", [f"{output}.centred", f"{output}.column"], f"{output}.blocks")
    yield _node("Reshape", [f"{output}.blocks", f"{output}.shape"], output)


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], output, **attributes)


def _name_own_rows(graph: GraphProto) -> None:
    """Describes what attention returns: the keys and values of a pass's own rows."""
    for value in graph.output:
        if value.name.startswith("present."):
            value.type.tensor_type.shape.dim[2].dim_param = "rows"


def _drop_unread(graph: GraphProto) -> None:
    """Drops weights, nodes of tables and inputs that nothing reads any more."""
    outputs = {value.name for value in graph.output}
    while True:
        read = {name for node in graph.node for name in node.input} | outputs
        kept = [node for node in graph.node if read & set(node.output)]
        if len(kept) == len(graph.node):
            break
        set_nodes(graph, kept)
    drop_unread(graph, _UNREAD)


def _mapped(graph: GraphProto, path: Path) -> dict[str, np.ndarray]:
    """Returns the weights that stand in the graph's file of weights, and drops them from it."""
    found: dict[str, np.ndarray] = {}
    files: dict[str, np.ndarray] = {}
    for at in reversed(range(len(graph.initializer))):
        stored = graph.initializer[at]
        if stored.data_location != TensorProto.EXTERNAL:
            continue
        told = {entry.key: entry.value for entry in stored.external_data}
        name = Path(told["location"]).name  # the bundle has no folders
        if name not in files:
            files[name] = np.memmap(path.parent / name, np.uint8, "c")
        start = int(told.get("offset", 0))
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(stored.data_type))
        size = int(np.prod(stored.dims)) * kind.itemsize
        found[stored.name] = files[name][start : start + size].view(kind).reshape(stored.dims)
        del graph.initializer[at]
    return found
