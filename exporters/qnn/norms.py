"""One operator for each root mean square norm of a static graph (Zhang and Sennrich 2019).

An NPU computes in float16, which ends at 65,504: squares of a residual stream beyond 256 do not
fit. Its compiler has the norm as an operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

# From what a norm divides by, backwards to the squares.
_STEPS = ("Sqrt", "Add", "ReduceMean", "Pow")


class _Norm(NamedTuple):
    nodes: list[NodeProto]  # all but the product with the weights
    epsilon: float


def fuse_norms(model: ModelProto) -> int:
    """Puts SimplifiedLayerNormalization in the place of the nodes of each norm; returns how many
    there were."""
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
        x = norm.nodes[0].input[0]
        fused[node.output[0]] = helper.make_node(
            "SimplifiedLayerNormalization",
            [x, node.input[1]],
            [node.output[0]],
            node.name,
            axis=-1,
            epsilon=norm.epsilon,
        )
        gone.update(each.output[0] for each in norm.nodes)
    kept = [fused.get(node.output[0], node) for node in graph.node if node.output[0] not in gone]
    del graph.node[:]
    graph.node.extend(kept)
    return len(fused)


def _norm(
    division: NodeProto, makers: Mapping[str, NodeProto], stored: Mapping[str, TensorProto]
) -> _Norm | None:
    """Finds the nodes of a norm; None where the division is not that of one."""
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
    return _Norm(nodes, numpy_helper.to_array(stored[nodes[2].input[1]]).item())
