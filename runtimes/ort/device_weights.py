"""Matrices on a device, which several graphs over the same file take from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime import OrtValue

from edge_spec.runtimes.ort.device_place import Place
from edge_spec.runtimes.ort.graph_forms import FormedGraph
from edge_spec.runtimes.ort.half_graph import stored_values

_MATRIX = {"MatMulNBits": 1, "MatMul": 1}  # which input of an operator it is
_SHARED = (np.uint8, np.float16, np.float32)


class DeviceMatrices:
    """Those of one bundle, each copied when a graph first wants it."""

    def __init__(self, place: Place, path: Path) -> None:
        """path: of the graph beside whose file they are."""
        self._place = place
        self._path = path
        # What owns its buffer is not taken as an initializer: beside each its owner.
        self._held: dict[str, tuple[OrtValue, OrtValue]] = {}

    def given(self, formed: FormedGraph) -> dict[str, OrtValue]:
        """Returns the matrices of a graph, by name.

        onnxruntime takes them as they are in place of the file's (`add_external_initializers`)
        where they lie where it wants them, and otherwise copies them.
        """
        model = onnx.load_model_from_string(formed.graph)
        stored = {
            proto.name: proto
            for proto in model.graph.initializer
            if proto.data_location == TensorProto.EXTERNAL
            and helper.tensor_dtype_to_np_dtype(proto.data_type) in _SHARED
        }
        found = {}
        for node in model.graph.node:
            name = node.input[_MATRIX[node.op_type]] if node.op_type in _MATRIX else ""
            if name not in stored:
                continue
            if name not in self._held:
                made = formed.initializers.get(name)
                values = stored_values(stored[name], self._path) if made is None else made
                owner = OrtValue.ortvalue_from_numpy(
                    np.ascontiguousarray(values), self._place.device, self._place.number
                )
                self._held[name] = OrtValue.from_dlpack(owner), owner
            found[name] = self._held[name][0]
        return found
