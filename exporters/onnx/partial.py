"""The same model with sublayers that may be left out, for drafts that are a part of their target.

A second graph over the same data file, in which each attention and each MLP is the branch of an
`If`; norms and residual sums stay outside, so that a pass that leaves nothing out computes what the
whole graph does, bit for bit. Leaving out all sublayers of the last layers is an early exit. More
inputs and outputs than the whole graph has, with one K for each sublayer, 2 * layer its attention
and 2 * layer + 1 its MLP:

    runs.K     [1] bool              whether the sublayer is run
    no_update  [1, rows, hidden]     zeros, what a sublayer that is left out adds
    embedded   [1, rows, hidden]     the residual stream before the first sublayer
    update.K   [1, rows, hidden]     what each sublayer adds to it

A sublayer that is left out passes its keys and values through, which are bound in place. The
graph that verifies has none of this: an `If` costs time even where its branch is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.onnx.graph import EMBEDDED, Sublayer, cache_shapes
from edge_spec.exporters.onnx.nodes import tensor

PARTIAL_FILE = "partial.onnx"
NO_UPDATE = "no_update"


def partial_model(
    whole: ModelProto, sublayers: Sequence[Sublayer], config: ModelConfig
) -> ModelProto:
    """Wraps each sublayer's nodes; refers to the weights where they are."""
    model = ModelProto()
    model.CopyFrom(whole)
    weights = {proto.name for proto in whole.graph.initializer}
    stream: list[int | str] = [1, "rows", config.hidden_size]
    nodes: list[NodeProto] = []
    done = 0
    for index, sublayer in enumerate(sublayers):
        nodes += whole.graph.node[done : sublayer.nodes.start]
        done = sublayer.nodes.stop
        own = whole.graph.node[sublayer.nodes]
        # Widening a stored weight: outside of a branch it is done once, when the graph is loaded.
        constant = [node for node in own if weights.issuperset(node.input)]
        nodes += constant
        inner = [node for node in own if node not in constant]
        nodes.append(_optional(index, sublayer, inner, config))
        model.graph.input.append(tensor(f"runs.{index}", TensorProto.BOOL, [1]))
        model.graph.output.append(tensor(f"update.{index}", TensorProto.FLOAT, stream))
    nodes += whole.graph.node[done:]
    model.graph.input.append(tensor(NO_UPDATE, TensorProto.FLOAT, stream))
    model.graph.output.append(tensor(EMBEDDED, TensorProto.FLOAT, stream))
    renamed = {sublayer.update: f"update.{index}" for index, sublayer in enumerate(sublayers)}
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    return model


def _optional(
    index: int, sublayer: Sublayer, nodes: Sequence[NodeProto], config: ModelConfig
) -> NodeProto:
    """An `If` that runs the nodes, or adds nothing and keeps the cache as it is."""
    update = f"update.{index}"
    produced = {sublayer.update: update}
    kept = {NO_UPDATE: update}
    shapes: dict[str, list[int | str]] = {update: [1, "rows", config.hidden_size]}
    if sublayer.layer is not None:
        for part, shape in cache_shapes(config, sublayer.layer).items():
            present = f"present.{sublayer.layer}.{part}"
            produced[present] = present
            kept[f"past.{sublayer.layer}.{part}"] = present
            shapes[present] = shape
    inner = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        for names in (copy.output, copy.input):  # a convolution reads the cache that it wrote
            names[:] = [produced[name] + ".run" if name in produced else name for name in names]
        inner.append(copy)
    passed = [
        helper.make_node("Identity", [source], [output + ".left"])
        for source, output in kept.items()
    ]
    return helper.make_node(
        "If",
        [f"runs.{index}"],
        list(shapes),
        update,
        then_branch=_branch(f"run.{index}", inner, shapes, ".run"),
        else_branch=_branch(f"left.{index}", passed, shapes, ".left"),
    )


def _branch(
    name: str, nodes: Sequence[NodeProto], shapes: dict[str, list[int | str]], suffix: str
) -> GraphProto:
    outputs = [
        tensor(output + suffix, TensorProto.FLOAT, shape) for output, shape in shapes.items()
    ]
    return helper.make_graph(nodes, name, [], outputs)
