"""A matrix of a head as onnxruntime multiplies with it: a graph of one node, weights included."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from edge_spec.core.heads import HeadMatrix
from edge_spec.exporters.block_quantize import joined, quantize
from edge_spec.exporters.onnx.graph import IR_VERSION, OPSET, tensor
from edge_spec.exporters.onnx.nodes import CONTRIB

BLOCK = 32  # weights that share a scale
_ACCURACY_INT8 = 4  # the node quantizes its input to int8 on the fly


def product_graph(matrix: HeadMatrix, bits: int) -> bytes:
    """Returns a serialized ModelProto: `x` [rows, in] float32 -> `y` [rows, out] float32.

    bits: 4 or 8. The matrix is read a part at a time, without zero points: blocks of its weights
    lie around 0.
    """
    stored = joined([quantize(read(), bits, BLOCK, symmetric=True) for read in matrix.parts])
    rows, columns = len(stored.packed), stored.columns
    tensors = {"weight": stored.packed, "scales": stored.scales}
    inputs = ["x", *tensors]
    if matrix.bias is not None:
        tensors["bias"] = matrix.bias.astype(np.float32)
        inputs += ["", "", "bias"]  # no zero points, no group index
    node = helper.make_node(
        "MatMulNBits",
        inputs,
        ["y"],
        domain=CONTRIB,
        K=columns,
        N=rows,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=_ACCURACY_INT8,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [tensor("x", TensorProto.FLOAT, ["rows", columns])],
        [tensor("y", TensorProto.FLOAT, ["rows", rows])],
        [numpy_helper.from_array(values, name) for name, values in tensors.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(model.SerializeToString())
