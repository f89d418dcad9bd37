"""A graph of a head as it grows: nodes and the weights that they read, all in one serialized model.

A head is small enough for that: what is bound to a model's size (files of weights, steps that can
be resumed) has no use here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from edge_spec.core.heads import FLOAT_BITS, HeadMatrix
from edge_spec.exporters.block_quantize import joined, quantize
from edge_spec.exporters.onnx.graph import IR_VERSION, OPSET
from edge_spec.exporters.onnx.nodes import CONTRIB, NodeList

BLOCK = 32  # weights that share a scale
_ACCURACY_INT8 = 4  # the node quantizes its input to int8 on the fly


class HeadGraph(NodeList):
    """Nodes and the weights that they read."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: list[TensorProto] = []

    def weight(self, name: str, values: np.ndarray) -> str:
        """Returns the name of what is stored; a second one of a name has to be the same."""
        if all(each.name != name for each in self._weights):
            self._weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def multiply(self, x: str, name: str, matrix: HeadMatrix, bits: int, output: str) -> str:
        """x: [..., in] -> [..., out], the bias added.

        bits: 4 or 8, or FLOAT_BITS for float32. The matrix is read a part at a time, without zero
        points: blocks of its weights lie around 0.
        """
        bias = None if matrix.bias is None else matrix.bias.astype(np.float32)
        if bits == FLOAT_BITS:
            return self._multiply_floats(x, name, matrix, bias, output)
        stored = joined([quantize(read(), bits, BLOCK, symmetric=True) for read in matrix.parts])
        inputs = [x, self.weight(name, stored.packed), self.weight(name + ".scales", stored.scales)]
        if bias is not None:
            inputs += ["", "", self.weight(name + ".bias", bias)]  # no zero points, no group index
        return self.add(
            "MatMulNBits",
            inputs,
            output,
            domain=CONTRIB,
            K=stored.columns,
            N=len(stored.packed),
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_ACCURACY_INT8,
        )

    def _multiply_floats(
        self, x: str, name: str, matrix: HeadMatrix, bias: np.ndarray | None, output: str
    ) -> str:
        whole = np.concatenate([read() for read in matrix.parts]).T
        inputs = [x, self.weight(name, whole)]
        if bias is None:
            return self.add("MatMul", inputs, output)
        product = self.add("MatMul", inputs, output + ".product")
        return self.add("Add", [product, self.weight(name + ".bias", bias)], output)

    def silu(self, x: str, output: str) -> str:
        return self.add("Mul", [x, self.add("Sigmoid", [x], x + ".sigmoid")], output)

    def norm(self, x: str, name: str, weight: np.ndarray, epsilon: float) -> str:
        """Root mean square normalization."""
        return self.add(
            "SimplifiedLayerNormalization",
            [x, self.weight(name, weight.astype(np.float32))],
            f"{name}.output",
            axis=-1,
            epsilon=epsilon,
        )

    def serialized(
        self, name: str, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
    ) -> bytes:
        """Returns a ModelProto."""
        graph = helper.make_graph(self.protos, name, inputs, outputs, self._weights)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return bytes(model.SerializeToString())
