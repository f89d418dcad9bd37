"""Turns a static graph into the form that Qualcomm's compiler for HTP takes whole.

It has no DequantizeLinear of weights beside float activations: such nodes stay on the CPU, which
would widen all weights in every pass. It has MatMulNBits, which multiplies by integers as they are
stored: 4 and 8 bits with a scale a block of a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_spec.exporters.block_quantize import BlockQuantized
from edge_spec.exporters.onnx.nodes import CONTRIB

BLOCK_SIZE = 32  # of 8-bit channels, whose scale is repeated
_WIDENS = "DequantizeLinear"


def write_htp_graph(source: Path, out: Path) -> None:
    """Reads the function of a static bundle at `source` and writes its form for HTP, the weights
    beside it."""
    model = onnx.load(source)
    fuse_norms(model)
    multiply_stored(model)
    # One file a graph: a message of protobuf holds 2 GB.
    onnx.save(model, out, save_as_external_data=True, location=f"{out.name}.data")


def multiply_stored(model: ModelProto) -> None:
    """Puts MatMulNBits in the place of each DequantizeLinear with the product that reads it.

    Raises ValueError for a matrix whose rows are not whole blocks.
    """
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    widened = {node.output[0]: node for node in graph.node if node.op_type == _WIDENS}
    made: dict[str, TensorProto] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in widened:
            nodes += _product(node, widened[node.input[1]], stored, made)
        else:
            nodes.append(node)
    read = {name for node in nodes for name in node.input}
    kept = [node for node in nodes if node.op_type != _WIDENS or node.output[0] in read]
    read = {name for node in kept for name in node.input}
    del graph.node[:]
    graph.node.extend(kept)
    kept_weights = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend([*kept_weights, *made.values()])
    if made:
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))


def _product(
    node: NodeProto,
    widens: NodeProto,
    stored: Mapping[str, TensorProto],
    made: dict[str, TensorProto],
) -> list[NodeProto]:
    """MatMulNBits for a product by widened weights. HTP takes it of three axes alone, and the
    product of a Gemm, the head's, has two."""
    names = [f"{widens.input[0]}.blocks", f"{widens.input[0]}.block_scales"]
    matrix = _matrix(widens, stored)
    for name, array in zip(names, (matrix.packed, matrix.scales.reshape(-1)), strict=True):
        if name not in made:
            made[name] = numpy_helper.from_array(array, name)
    rows, columns = len(matrix.packed), matrix.columns
    sizes = {"K": columns, "N": rows, "bits": matrix.bits, "block_size": matrix.block_size}
    x, output = node.input[0], node.output[0]
    if node.op_type == "MatMul":
        return [_multiply([x, *names], output, sizes)]
    for name, shape in (("batch_of_rows", [1, -1, columns]), ("rows_of_scores", [-1, rows])):
        made[name] = numpy_helper.from_array(np.array(shape), name)
    inner, product = f"{output}.rows", f"{output}.batch"
    return [
        helper.make_node("Reshape", [x, "batch_of_rows"], [inner], inner),
        _multiply([inner, *names], product, sizes),
        helper.make_node("Reshape", [product, "rows_of_scores"], [output], output),
    ]


def _multiply(inputs: list[str], output: str, sizes: Mapping[str, Any]) -> NodeProto:
    return helper.make_node("MatMulNBits", inputs, [output], output, domain=CONTRIB, **sizes)


def _matrix(node: NodeProto, stored: Mapping[str, TensorProto]) -> BlockQuantized:
    """Read what a DequantizeLinear of onnx/weights.py widens: 4-bit blocks [in, out], or 8-bit
    channels of either order."""
    levels, scales = (stored[name] for name in node.input[:2])
    found, scale = numpy_helper.to_array(levels), numpy_helper.to_array(scales)
    bits = 4 if levels.data_type == TensorProto.INT4 else 8
    if bits == 4:
        rows, scale = found.T, scale.T
    else:
        axis = next(each.i for each in node.attribute if each.name == "axis")
        rows = found if axis == 0 else found.T
        blocks, rest = divmod(rows.shape[1], BLOCK_SIZE)
        if rest:
            raise ValueError(
                f"rows of {rows.shape[1]} weights are not whole blocks of {BLOCK_SIZE}"
            )
        scale = np.repeat(scale[:, None], blocks, axis=1)
    middle = 1 << (bits - 1)
    unsigned = (rows.astype(np.int16) + middle).astype(np.uint8)
    zeros = np.full(scale.shape, middle, np.uint8)
    in_blocks = unsigned.reshape(*scale.shape, -1)
    return BlockQuantized.of(in_blocks, scale, zeros, bits, rows.shape[1])


# From what a norm divides by, backwards to the squares.
_STEPS = ("Sqrt", "Add", "ReduceMean", "Pow")


def fuse_norms(model: ModelProto) -> int:
    """Puts SimplifiedLayerNormalization in the place of the nodes of each root mean square norm
    (Zhang and Sennrich 2019); returns how many there were.

    An NPU computes in float16, which ends at 65,504: squares of a residual stream beyond 256 do not
    fit. Its compiler has the norm as an operator.
    """
    graph = model.graph
    makers = {node.output[0]: node for node in graph.node}
    stored = {tensor.name: tensor for tensor in graph.initializer}
    fused: dict[str, NodeProto] = {}
    gone: set[str] = set()
    for node in graph.node:
        if node.op_type != "Mul" or node.input[0] not in makers:
            continue
        norm = _norm(makers[node.input[0]], makers, stored)
        if norm is None or node.input[1] not in stored:
            continue
        nodes, epsilon = norm
        fused[node.output[0]] = helper.make_node(
            "SimplifiedLayerNormalization",
            [nodes[0].input[0], node.input[1]],
            [node.output[0]],
            node.name,
            axis=-1,
            epsilon=epsilon,
        )
        gone.update(each.output[0] for each in nodes)
    kept = [fused.get(node.output[0], node) for node in graph.node if node.output[0] not in gone]
    del graph.node[:]
    graph.node.extend(kept)
    return len(fused)


def _norm(
    division: NodeProto, makers: Mapping[str, NodeProto], stored: Mapping[str, TensorProto]
) -> tuple[list[NodeProto], float] | None:
    """Returns the nodes of a norm, all but the product with the weights, and its epsilon; None
    where the division is not that of one."""
    if division.op_type != "Div":
        return None
    nodes, name = [division], division.input[1]
    for step in _STEPS:
        node = makers.get(name)
        if node is None or node.op_type != step:
            return None
        nodes.append(node)
        name = node.input[0]
    if name != division.input[0]:
        return None
    return nodes, numpy_helper.to_array(stored[nodes[2].input[1]]).item()
