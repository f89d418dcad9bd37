"""Weights of an ONNX model, written beside it as they are made.

External data keeps the graph file small and lets onnxruntime map the weights; writing each
tensor at once keeps an export's memory at that of its largest tensor.
"""

from __future__ import annotations

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
        if name in self._names:
            return name
        self._names.add(name)
        values = np.ascontiguousarray(values)
        if values.nbytes <= INLINE_BYTES:
            self.protos.append(numpy_helper.from_array(values, name))
            return name
        offset = -(-self._data.tell() // _ALIGNMENT) * _ALIGNMENT
        self._data.write(b"\0" * (offset - self._data.tell()))
        self._data.write(values.data)
        proto = TensorProto(
            name=name,
            dims=values.shape,
            data_type=helper.np_dtype_to_tensor_dtype(values.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (("location", DATA_FILE), ("offset", offset), ("length", values.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self.protos.append(proto)
        return name
