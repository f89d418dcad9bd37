"""The graph of a model for passes that several sessions share: one attention for each of them.

Made from the graph of exporters/onnx/graph.py when it is first wanted. Between the nodes that take
the attended rows of a layer and those that put them back, everything is repeated for each place of
a session, with a suffix to its names; so are the inputs that attention takes, and the caches. All
products stay as they are, over the rows of all sessions side by side. A session's attention is then
the very operator of a pass of its own, of the same shapes: its scores are the same bit for bit
where those of rows in passes of different widths are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, ValueInfoProto, helper

from edge_spec.errors import BundleError

_BEGINS, _ENDS = "attention_rows", "kept_rows"  # inputs of the nodes around attention
_OF_A_SESSION = (
    _BEGINS,
    "position_ids",
    "attention_bias",
    "seqlens_k",
    "total_sequence_length",
)
_CACHES = ("past.", "present.")
_OWN_SIZES = ("attended", "total", "capacity")


def place_suffix(place: int) -> str:
    """Of the names of one session's inputs, outputs and nodes."""
    return f"@{place}"


def joint_graph(path: Path, num_places: int) -> bytes:
    """Returns a serialized ModelProto that refers to the same file of weights.

    Raises BundleError for a graph without the nodes that it is divided at."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    regions = list(_regions(graph))
    if not regions:
        raise BundleError(
            f"{path} has no attention that sessions could share a pass around",
            remedy="Export the model again.",
        )
    before = {region.end: region for region in regions}
    repeated = {node.name for region in regions for node in region.nodes}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.name in before:
            nodes += before[node.name].repeat(num_places)
        if node.name not in repeated:
            nodes.append(node)
    inputs = list(_repeated_values(graph.input, num_places))
    outputs = list(_repeated_values(graph.output, num_places))
    for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(kept)
    return bytes(model.SerializeToString())


class _Region:
    """The nodes of one attention, from the rows that it attends to what it gives for them."""

    def __init__(self, start: NodeProto) -> None:
        self.nodes = [start]
        self.produced = set(start.output)
        self.result = self.end = ""  # the last output, and the name of the node that takes it

    def add(self, node: NodeProto) -> bool:
        """Whether it was the last one, which takes the result back to all rows."""
        if not self.produced.intersection(node.input):
            return False
        if _ENDS in node.input:
            self.result, self.end = node.input[0], node.name
            return True
        self.nodes.append(node)
        self.produced.update(node.output)
        return False

    def repeat(self, num_places: int) -> Iterator[NodeProto]:
        for place in range(num_places):
            suffix = place_suffix(place)
            for node in self.nodes:
                copy = NodeProto()
                copy.CopyFrom(node)
                copy.name += suffix
                copy.input[:] = [
                    name + suffix if name in self.produced or _is_own(name) else name
                    for name in node.input
                ]
                copy.output[:] = [name + suffix if name else name for name in node.output]
                yield copy
        parts = [self.result + place_suffix(place) for place in range(num_places)]
        yield helper.make_node("Concat", parts, [self.result], self.result, axis=1)


def _regions(graph: GraphProto) -> Iterator[_Region]:
    """One for each layer; the nodes of a graph stand in the order they run in."""
    region: _Region | None = None
    for node in graph.node:
        if region is None:
            region = _Region(node) if _BEGINS in node.input else None
        elif region.add(node):
            yield region
            region = None


def _repeated_values(
    values: Sequence[ValueInfoProto], num_places: int
) -> Iterator[ValueInfoProto]:
    for value in values:
        if not _is_own(value.name):
            yield value
            continue
        for place in range(num_places):
            copy = ValueInfoProto()
            copy.CopyFrom(value)
            copy.name += place_suffix(place)
            for size in copy.type.tensor_type.shape.dim:
                if size.dim_param in _OWN_SIZES:
                    size.dim_param += place_suffix(place)
            yield copy


def _is_own(name: str) -> bool:
    return name in _OF_A_SESSION or name.startswith(_CACHES)
