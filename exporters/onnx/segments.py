"""The same model in segments, for weights that take long to load.

onnxruntime packs the matrices of a graph one after the other, on one core, each time it is loaded;
segments are loaded at the same time. A segment is a run of the whole graph's nodes over the same
weights in the same data file. It ends after the MLP of a layer, so that nothing that onnxruntime
fuses is cut: its scores are those of the whole graph, bit for bit. What a later segment takes of
an earlier one is an output there and an input here, of the same name:

    stream  [1, rows, hidden]     the residual stream, or what the last sublayer adds to it

What is made of other inputs than tokens, such as the bias of a window, each segment makes itself.

A draft that is a part of its target has a second graph over the same data file, in which every
sublayer is optional. Each attention and each MLP is the
branch of an `If`; norms and residual sums stay outside, so that a pass that leaves nothing out
computes what the whole graph does, bit for bit. Leaving out all sublayers of the last layers is
an early exit. More inputs and outputs than the whole graph has, with one K for each sublayer,
2 * layer its attention and 2 * layer + 1 its MLP:

    runs.K     [1] bool              whether the sublayer is run
    no_update  [1, rows, hidden]     zeros, what a sublayer that is left out adds
    embedded   [1, rows, hidden]     the residual stream before the first sublayer
    update.K   [1, rows, hidden]     what each sublayer adds to it

A sublayer that is left out passes its keys and values through, which are bound in place. The
graph that verifies has none of this: an `If` costs time even where its branch is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.onnx.graph import EMBEDDED, Sublayer, cache_shapes
from edge_spec.exporters.onnx.nodes import read_names, tensor

SEGMENT_FILE = "segment.{}.onnx"  # from 0
SEGMENT_BYTES = 300_000_000  # of weights; less is loaded in the time that it takes to begin
MAX_SEGMENTS = 2


def segment_models(
    whole: ModelProto, sublayers: Sequence[Sublayer], config: ModelConfig
) -> list[ModelProto]:
    """Cuts the graph into segments of about as many bytes; none for a model that is too small,
    or whose layers take more of those before them than the stream."""
    if config.kv_sources or config.layer_embeddings:  # which no segment has by itself
        return []
    nodes = whole.graph.node
    sizes = {proto.name: _num_bytes(proto) for proto in whole.graph.initializer}
    total = sum(_packed_bytes(node, sizes) for node in nodes)
    count = min(total // SEGMENT_BYTES, MAX_SEGMENTS, config.num_layers)
    if count < 2:
        return []
    ends = [each.nodes.stop for each in sublayers if each.layer is None][:-1]
    bytes_before = {end: sum(_packed_bytes(node, sizes) for node in nodes[:end]) for end in ends}
    cuts = [
        min(ends, key=lambda end: abs(bytes_before[end] - total * number // count))
        for number in range(1, count)
    ]
    return [
        _segment(whole, slice(start, stop), config)
        for start, stop in pairwise([0, *sorted(set(cuts)), len(nodes)])
    ]


def _segment(whole: ModelProto, part: slice, config: ModelConfig) -> ModelProto:
    graph = whole.graph
    alone = _apart_from_tokens(graph)
    nodes = [*_needed(alone, graph.node[part]), *graph.node[part]]
    made = {name for node in nodes for name in node.output if name}
    taken = read_names(nodes) - made
    others = [*graph.node[: part.start], *graph.node[part.stop :]]
    taken_later = read_names(others) - {name for node in alone for name in node.output}
    inputs = [value for value in graph.input if value.name in taken]
    outputs = [value for value in graph.output if value.name in made]
    weights = [proto for proto in graph.initializer if proto.name in taken]
    known = {value.name for value in [*inputs, *outputs]} | {proto.name for proto in weights}
    model = ModelProto()
    model.CopyFrom(whole)
    for field, content in (
        (model.graph.node, nodes),
        (model.graph.initializer, weights),
        (model.graph.input, [*inputs, *_streams(sorted(taken - known), config)]),
        (model.graph.output, [*outputs, *_streams(sorted(made & taken_later - known), config)]),
    ):
        del field[:]
        field.extend(content)
    return model


def _apart_from_tokens(graph: GraphProto) -> list[NodeProto]:
    """Returns what is made of weights and of other inputs than tokens."""
    known = {value.name for value in [*graph.input, *graph.initializer]} - {"input_ids"}
    alone = []
    for node in graph.node:
        if known.issuperset(read_names([node])):
            alone.append(node)
            known.update(node.output)
    return alone


def _needed(alone: Sequence[NodeProto], nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Those of `alone` that nodes need and do not have, in the order they run in."""
    made = {name for node in nodes for name in node.output}
    wanted = read_names(nodes) - made
    kept: list[NodeProto] = []
    for node in reversed(alone):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted |= read_names([node])
    return kept[::-1]


def _streams(names: Sequence[str], config: ModelConfig) -> list[ValueInfoProto]:
    shape: list[int | str] = [1, "rows", config.hidden_size]
    return [tensor(name, TensorProto.FLOAT, shape) for name in names]


def _packed_bytes(node: NodeProto, sizes: dict[str, int]) -> int:
    """Counts the weights of a node that are packed; of an embedding, rows are only looked up."""
    return 0 if "Gather" in node.op_type else sum(sizes.get(name, 0) for name in read_names([node]))


def _num_bytes(proto: TensorProto) -> int:
    lengths = [int(entry.value) for entry in proto.external_data if entry.key == "length"]
    return sum(lengths)


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
    outputs: list[ValueInfoProto] = [
        tensor(output + suffix, TensorProto.FLOAT, shape) for output, shape in shapes.items()
    ]
    return helper.make_graph(nodes, name, [], outputs)
