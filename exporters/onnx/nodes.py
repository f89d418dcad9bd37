"""The growing list of a graph's nodes, and the weights beside them, written as they are made.

External data keeps the graph file small and lets onnxruntime map the weights; writing each
tensor at once keeps an export's memory at that of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

CONTRIB = "com.microsoft"


class NodeList:
    """Nodes in the order in which they run."""

    def __init__(self) -> None:
        self.protos: list[NodeProto] = []

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Appends a node and returns the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        node = helper.make_node(op, list(inputs), names, names[0], domain=domain, **attributes)
        self.protos.append(node)
        return names[0]


class Nodes(NodeList):
    """Collects nodes of a graph whose weights are stored elsewhere."""

    def __init__(self, weights: Initializers) -> None:
        super().__init__()
        self.weights = weights


DATA_FILE = "model.onnx.data"
INLINE_BYTES = 1024
_ALIGNMENT = 4096  # a memory page, so that a tensor can be mapped where it lies


class Initializers:
    """Collects the TensorProtos of a graph; the bytes of all but tiny ones go to `data`."""

    def __init__(self, data: BinaryIO) -> None:
        self.protos: list[TensorProto] = []
        self._data = data
        self._names: set[str] = set()

    def add(self, name: str, values: np.ndarray) -> str:
        """Writes `values` unless a tensor of this name was written before; returns the name."""
        return self.add_made(name, lambda: values)

    def add_made(self, name: str, make: Callable[[], np.ndarray]) -> str:
        """Adds as `add` does what `make` returns, which is called only where it is written."""
        if name not in self._names:
            self._names.add(name)
            self.protos.append(self._written(name, make()))
        return name

    def add_int4(self, name: str, make: Callable[[], np.ndarray]) -> str:
        """Adds what `make` returns, int8 from -8 to 7, as 4-bit integers, two in a byte."""
        if name not in self._names:
            self._names.add(name)
            self.protos.append(self._written_int4(name, make()))
        return name

    def _written(self, name: str, values: np.ndarray) -> TensorProto:
        values = np.ascontiguousarray(values)
        if values.nbytes <= INLINE_BYTES:
            return numpy_helper.from_array(values, name)
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        return self._external(TensorProto(name=name, dims=values.shape, data_type=kind), values)

    def _written_int4(self, name: str, values: np.ndarray) -> TensorProto:
        pairs = values.reshape(-1, 2).view(np.uint8) & 15
        packed = pairs[:, 0] | pairs[:, 1] << 4
        proto = TensorProto(name=name, dims=values.shape, data_type=TensorProto.INT4)
        return self._external(proto, packed)

    def _external(self, proto: TensorProto, stored: np.ndarray) -> TensorProto:
        offset = aligned(self._data)
        self._data.write(stored.data)
        refer_outside(proto, DATA_FILE, offset, stored.nbytes)
        return proto


def aligned(data: BinaryIO) -> int:
    """Pads a file of weights to where a tensor can be mapped, and returns where that is."""
    end = data.tell()
    offset = -(-end // _ALIGNMENT) * _ALIGNMENT
    data.write(b"\0" * (offset - end))
    return offset


def refer_outside(proto: TensorProto, location: str, offset: int, length: int) -> None:
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        proto.external_data.add(key=key, value=str(value))


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
