"""The growing list of a graph's nodes, and the weights beside them, written as they are made.

External data keeps the graph file small and lets onnxruntime map the weights; writing each
tensor at once keeps an export's memory at that of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

CONTRIB = "com.microsoft"
OPSET = 21
IR_VERSION = 10


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

    def model(
        self,
        name: str,
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        opset: int = OPSET,
    ) -> ModelProto:
        used = read_names(self.protos)
        weights = [each for each in self.weights.protos if each.name in used]
        graph = helper.make_graph(self.protos, name, inputs, outputs, weights)
        opsets = [helper.make_opsetid("", opset)]
        if any(node.domain == CONTRIB for node in self.protos):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edge-spec"
        )


def read_names(nodes: Iterable[NodeProto]) -> set[str]:
    """Returns what nodes read, and what branches of theirs read from outside of them."""
    names: set[str] = set()
    for node in nodes:
        names.update(name for name in node.input if name)
        for attribute in node.attribute:
            inner = attribute.g.node
            names |= read_names(inner) - {name for each in inner for name in each.output}
    return names


def tensor(name: str, kind: int, shape: Sequence[int | str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


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
