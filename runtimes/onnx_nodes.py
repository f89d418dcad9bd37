"""Nodes of our bundles' graphs (exporters/onnx/graph.py), changed in memory for other libraries and
devices than onnxruntime's CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

POSITIONS = "position_ids"
ATTENTION_ROWS = ("attention_rows", "kept_rows")  # inputs: rows that onnxruntime's CPU repeats
_OPSET = 21  # of all nodes but those of the stacked form; few devices know newer ones


def keep_general_forms(model: ModelProto) -> None:
    """Replaces each `If` by the nodes of its second branch, which suits any number of rows."""
    graph = model.graph
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type != "If":
            nodes.append(node)
            continue
        branch = next(each.g for each in node.attribute if each.name == "else_branch")
        names = zip((value.name for value in branch.output), node.output, strict=True)
        nodes += _renamed(branch.node, dict(names))
    set_nodes(graph, nodes)
    for opset in model.opset_import:
        if opset.domain == "":
            opset.version = _OPSET


def attend_once(graph: GraphProto) -> None:
    """Drops the nodes that repeat rows before attention and drop them after it."""
    taken = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Gather" and node.input[1] in ATTENTION_ROWS
    }
    kept = [node for node in graph.node if node.output[0] not in taken]
    for node in kept:
        if list(node.input) == [POSITIONS] and node.op_type == "Squeeze":
            graph.initializer.append(numpy_helper.from_array(np.array([0]), "first_axis"))
            node.input.append("first_axis")  # one row stays a row
    set_nodes(graph, _renamed(kept, taken))
    for value in graph.input:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == "attended":
                size.dim_param = "rows"


def set_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Gives a graph these nodes, which may be its own."""
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def drop_unread(graph: GraphProto, unwanted: Set[str]) -> None:
    """Drops weights that no node reads, and so those of the `unwanted` inputs."""
    read = {name for node in graph.node for name in node.input}
    inputs = [at for at, value in enumerate(graph.input) if value.name in unwanted - read]
    weights = [at for at, value in enumerate(graph.initializer) if value.name not in read]
    for values, unread in ((graph.input, inputs), (graph.initializer, weights)):
        for at in reversed(unread):
            del values[at]


def _renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    nodes = list(nodes)
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return nodes
