"""Weights of an ONNX model, written beside it as they are made.

External data keeps the graph file small and lets onnxruntime map the weights; writing each
tensor at once keeps an export's memory at that of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import numpy as np
from onnx import TensorProto, helper, numpy_helper

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
        end = self._data.tell()
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._data.write(b"\0" * (offset - end))
        self._data.write(stored.data)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA_FILE), ("offset", offset), ("length", stored.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        return proto
