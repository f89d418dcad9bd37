"""The nodes of a growing graph, and its weights, which are written as they are made.

External data keeps the graph small and lets onnxruntime map the weights; an export's memory is
bounded by its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from edge_spec.exporters.block_quantize import BlockQuantized
from edge_spec.exporters.requests import BLOCK_SIZE

CONTRIB = "com.microsoft"
OPSET = 21
IR_VERSION = 10
_ACCURACY_INT8 = 4  # quantize the input to int8 on the fly


class Nodes:
    """Collect a graph's nodes in execution order; the weights are stored elsewhere."""

    def __init__(self, weights: Initializers) -> None:
        self.protos: list[NodeProto] = []
        self.weights = weights

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Append a node and return the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        node = helper.make_node(op, list(inputs), names, names[0], domain=domain, **attributes)
        self.protos.append(node)
        return names[0]

    def constant(self, name: str, values: Any, kind: Any = None) -> str:
        return self.weights.add(name, np.array(values, kind))

    def reshape(self, x: str, shape_name: str, shape: Sequence[int], output: str) -> str:
        return self.add("Reshape", [x, self.constant(shape_name, shape)], output)

    def rms_norm(self, x: str, weight: str, epsilon: float, output: str) -> str:
        """RMS norm over the last axis (Zhang and Sennrich 2019)."""
        kind = "SimplifiedLayerNormalization"
        return self.add(kind, [x, weight], output, axis=-1, epsilon=epsilon)

    def multiply_blocks(
        self,
        inputs: list[str],
        shape: tuple[int, ...],
        bits: int,
        output: str,
        rounds_inputs: bool = True,
    ) -> str:
        """Multiply by a matrix of integer blocks.

        inputs: x, packed values, scales, optionally zero points, group index, bias; shape: the
        matrix's; rounds_inputs: to int8, else the runtime decides.
        """
        rows, columns = shape
        return self.add(
            "MatMulNBits",
            inputs,
            output,
            domain=CONTRIB,
            K=columns,
            N=rows,
            bits=bits,
            block_size=BLOCK_SIZE,
            accuracy_level=_ACCURACY_INT8 if rounds_inputs else None,
        )

    def store_parts(
        self, name: str, packed: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None
    ) -> list[str]:
        """Store the parts of blocks of integers; return their names."""
        parts = {name: packed, f"{name}.scales": scales, f"{name}.zero_points": zero_points}
        return [self.weights.add(part, of) for part, of in parts.items() if of is not None]

    def store_blocks(self, name: str, weight: BlockQuantized) -> list[str]:
        return self.store_parts(name, weight.packed, weight.scales, weight.zero_points)

    def multiply_stored(
        self,
        x: str,
        name: str,
        weight: BlockQuantized,
        output: str,
        bias: tuple[str, np.ndarray] | None = None,
    ) -> str:
        """Multiply by a matrix stored as `name`. bias: its name and values."""
        inputs = [x, *self.store_blocks(name, weight)]
        if bias is not None:
            inputs += [""] * (5 - len(inputs))  # no zero points, no group index
            inputs.append(self.weights.add(*bias))
        shape = (len(weight.packed), weight.columns)
        return self.multiply_blocks(inputs, shape, weight.bits, output)

    def store_experts(self, name: str, experts: Sequence[BlockQuantized]) -> list[str]:
        """Store packed values as [experts, rows, bytes]."""
        parts = zip(
            *((each.flat(), each.scales, each.stated_zero_points()) for each in experts),
            strict=True,
        )
        return self.store_parts(name, *map(np.stack, parts))

    def choose(self, condition: str, outputs: str | list[str], *branches: GraphProto) -> str:
        """Choose between two branches with the same outputs."""
        then_branch, else_branch = branches
        return self.add(
            "If", [condition], outputs, then_branch=then_branch, else_branch=else_branch
        )

    def subgraph(
        self, name: str, outputs: Sequence[str], shape: Sequence[int | None] | None = None
    ) -> GraphProto:
        """Return a branch with these float outputs. shape: of each, if known."""
        kind = TensorProto.FLOAT
        values = [helper.make_tensor_value_info(each, kind, shape) for each in outputs]
        return helper.make_graph(self.protos, name, [], values)

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
    """Return all names that nodes and their branches read from outside."""
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
_ALIGNMENT = 4096  # a memory page: a tensor can be mapped in place


class Initializers:
    """Collect a graph's TensorProtos; all but tiny ones are written to `data`."""

    def __init__(self, data: BinaryIO, location: str = DATA_FILE) -> None:
        """location: the graph's name of `data`."""
        self.protos: list[TensorProto] = []
        self._data, self._location = data, location
        self._names: set[str] = set()

    def add(self, name: str, values: np.ndarray) -> str:
        """Write `values` unless a tensor has this name already; return the name."""
        return self.add_made(name, lambda: values)

    def add_made(self, name: str, make: Callable[[], np.ndarray]) -> str:
        """As `add`; calls `make` only if it writes."""
        if name not in self._names:
            self._names.add(name)
            values = np.ascontiguousarray(make())
            if values.nbytes <= INLINE_BYTES:
                self.protos.append(numpy_helper.from_array(values, name))
                return name
            kind = helper.np_dtype_to_tensor_dtype(values.dtype)
            proto = TensorProto(name=name, dims=values.shape, data_type=kind)
            self.protos.append(self._external(proto, values))
        return name

    def add_int4(self, name: str, make: Callable[[], np.ndarray]) -> str:
        """Add the int8 values of `make`, -8 to 7, as 4-bit integers, two per byte."""
        if name not in self._names:
            self._names.add(name)
            values = make()
            pairs = values.reshape(-1, 2).view(np.uint8) & 15
            proto = TensorProto(name=name, dims=values.shape, data_type=TensorProto.INT4)
            self.protos.append(self._external(proto, pairs[:, 0] | pairs[:, 1] << 4))
        return name

    def _external(self, proto: TensorProto, stored: np.ndarray) -> TensorProto:
        """Write `stored` at the file's next page."""
        end = self._data.tell()
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._data.write(b"\0" * (offset - end))
        self._data.write(stored.data)
        proto.data_location = TensorProto.EXTERNAL
        where = {"location": self._location, "offset": offset, "length": stored.nbytes}
        for key, value in where.items():
            proto.external_data.add(key=key, value=str(value))
        return proto
