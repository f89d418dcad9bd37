"""The same model in segments, for weights that take long to load.

onnxruntime packs the matrices of a graph one after the other, on one core, each time it is loaded;
segments are loaded at the same time. A segment is a run of the whole graph's nodes over the same
weights in the same data file. It ends after the MLP of a layer, so that nothing that onnxruntime
fuses is cut: its scores are those of the whole graph, bit for bit. What a later segment takes of
an earlier one is an output there and an input here, of the same name:

    stream  [1, rows, hidden]     the residual stream, or what the last sublayer adds to it

What is made of other inputs than tokens, such as the bias of a window, each segment makes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.onnx.graph import Sublayer, tensor

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
    taken = _taken(nodes) - made
    others = [*graph.node[: part.start], *graph.node[part.stop :]]
    taken_later = _taken(others) - {name for node in alone for name in node.output}
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
        if known.issuperset(_taken([node])):
            alone.append(node)
            known.update(node.output)
    return alone


def _needed(alone: Sequence[NodeProto], nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Those of `alone` that nodes need and do not have, in the order they run in."""
    made = {name for node in nodes for name in node.output}
    wanted = _taken(nodes) - made
    kept: list[NodeProto] = []
    for node in reversed(alone):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted |= _taken([node])
    return kept[::-1]


def _taken(nodes: Sequence[NodeProto]) -> set[str]:
    """Returns what nodes read, and what the branches of an `If` read from outside of them."""
    names: set[str] = set()
    for node in nodes:
        names.update(name for name in node.input if name)
        for attribute in node.attribute:
            inner = attribute.g.node
            names |= _taken(inner) - {name for each in inner for name in each.output}
    return names


def _streams(names: Sequence[str], config: ModelConfig) -> list[ValueInfoProto]:
    shape: list[int | str] = [1, "rows", config.hidden_size]
    return [tensor(name, TensorProto.FLOAT, shape) for name in names]


def _packed_bytes(node: NodeProto, sizes: dict[str, int]) -> int:
    """Counts the weights of a node that are packed; of an embedding, rows are only looked up."""
    return 0 if "Gather" in node.op_type else sum(sizes.get(name, 0) for name in _taken([node]))


def _num_bytes(proto: TensorProto) -> int:
    lengths = [int(entry.value) for entry in proto.external_data if entry.key == "length"]
    return sum(lengths)
