"""A matrix of a head as onnxruntime multiplies with it: a graph of one node, weights included."""

from __future__ import annotations

from onnx import TensorProto

from edge_spec.core.heads import HeadMatrix
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.onnx.graph import tensor


def product_graph(matrix: HeadMatrix, bits: int) -> bytes:
    """Returns a serialized ModelProto: `x` [rows, in] float32 -> `y` [rows, out] float32.

    bits: see `HeadGraph.multiply`.
    """
    graph = HeadGraph()
    graph.multiply("x", "weight", matrix, bits, "y")
    return graph.serialized(
        "product",
        [tensor("x", TensorProto.FLOAT, ["rows", "in"])],
        [tensor("y", TensorProto.FLOAT, ["rows", "out"])],
    )
