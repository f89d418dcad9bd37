"""The graph of a model for passes that several sessions share: one attention for each of them.

Made from the graph of exporters/onnx/graph.py when it is first wanted. The attention of a layer is
repeated for each place of a session, with a suffix to its names; so are the inputs that only
attention takes, and the caches. All products stay as they are, over the rows of all sessions side
by side. A session's attention is then the very operator of a pass of its own, of the same shapes:
its scores are the same bit for bit where those of rows in passes of different widths are.

    attention_rows@P   [attended] int64   which row of the pass each attended one of place P repeats
    kept_rows          [rows] int64       which attended row, counted over all places, goes on as
                                          each row
    ...@P                                 the other inputs of attention, as in a pass of its own

A graph with two forms of attention (exporters/onnx/attention.py) has an `If` for it, in which a
place's rows are alone, with two more inputs:

    own_rows@P         [own] int64        which rows of the pass are those of place P
    kept_rows@P        [own] int64        of attention_rows@P, which counts from its own first row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.errors import BundleError
from edge_spec.runtimes.ort.signature import STACKED

OWN_ROWS = "own_rows"
_BEGINS, _ENDS = "attention_rows", "kept_rows"  # inputs of the nodes around attention
_OF_A_SESSION = (
    _BEGINS,
    OWN_ROWS,
    STACKED,
    "position_ids",
    "attention_bias",
    "seqlens_k",
    "total_sequence_length",
    "cached_tokens",
    "ancestors",
)
_CACHES = ("past.", "present.")
_OWN_SIZES = ("attended", "total", "capacity", "slots")


def place_suffix(place: int) -> str:
    """Returns the end of the names of one session's inputs, outputs and nodes."""
    return f"@{place}"


def joint_graph(path: Path, num_places: int) -> bytes:
    """Returns a serialized ModelProto that refers to the same file of weights.

    Raises BundleError for a graph without the nodes that it is divided at."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    has_forms = any(value.name == STACKED for value in graph.input)
    regions = list(_forms(graph) if has_forms else _regions(graph))
    if not regions:
        raise BundleError(
            f"{path} has no attention that sessions could share a pass around",
            remedy="Export the model again.",
        )
    nodes = list(_repeated_nodes(graph, regions, num_places))
    inputs = list(graph.input)
    if has_forms:
        inputs.append(helper.make_tensor_value_info(OWN_ROWS, TensorProto.INT64, ["own"]))
    own = (*_OF_A_SESSION, _ENDS) if has_forms else _OF_A_SESSION
    taken = list(_repeated_values(inputs, num_places, own))
    if has_forms:
        taken.append(helper.make_tensor_value_info(_ENDS, TensorProto.INT64, ["rows"]))
    given = list(_repeated_values(graph.output, num_places, own))
    for field, values in ((graph.node, nodes), (graph.input, taken), (graph.output, given)):
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(kept)
    return bytes(model.SerializeToString())


@dataclass
class _Region:
    """The nodes of one attention, from the rows that it attends to what it gives for them.

    end: the node that comes after them all. result: what it takes, in place of which it gets those
    of all places. rows: of an `If` of both forms, what it reads of the rows of the pass."""

    nodes: list[NodeProto]
    produced: set[str]
    result: str = ""
    end: str = ""
    rows: str = ""

    def repeat(self, num_places: int) -> Iterator[NodeProto]:
        suffixes = [place_suffix(place) for place in range(num_places)]
        for suffix in suffixes:
            renamed = {}
            if self.rows:
                own = f"{self.result}.{OWN_ROWS}{suffix}"
                yield helper.make_node("Gather", [self.rows, OWN_ROWS + suffix], [own], own, axis=1)
                renamed = {self.rows: own, _ENDS: _ENDS + suffix}
            for node in self.nodes:
                yield _placed(node, suffix, self.produced, renamed)
        joined = f"{self.result}.joined" if self.rows else self.result
        parts = [self.result + suffix for suffix in suffixes]
        yield helper.make_node("Concat", parts, [joined], joined, axis=1)
        if self.rows:
            yield helper.make_node("Gather", [joined, _ENDS], [self.result], self.result, axis=1)


def _placed(
    node: NodeProto, suffix: str, produced: set[str], renamed: Mapping[str, str]
) -> NodeProto:
    """A copy for one place: what is produced there, and a session's inputs, get the suffix."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name += suffix
    copy.input[:] = [
        name + suffix if name in produced or _is_own(name) else renamed.get(name, name)
        for name in node.input
    ]
    copy.output[:] = [name + suffix if name else name for name in node.output]
    for attribute in copy.attribute:
        if attribute.type == AttributeProto.GRAPH:
            _place_branch(attribute.g, suffix, produced, renamed)
    return copy


def _place_branch(
    branch: GraphProto, suffix: str, produced: set[str], renamed: Mapping[str, str]
) -> None:
    inner = produced.union(*(node.output for node in branch.node))
    nodes = [_placed(node, suffix, inner, renamed) for node in branch.node]
    del branch.node[:]
    branch.node.extend(nodes)
    for value in branch.output:
        value.name += suffix


def _repeated_nodes(
    graph: GraphProto, regions: Sequence[_Region], num_places: int
) -> Iterator[NodeProto]:
    """Yields the nodes of the graph, attention once for each place; so are those that make
    something of a session's inputs before any attention, such as the bias of a window."""
    before = {region.end: region for region in regions}
    repeated = {node.name for region in regions for node in region.nodes}
    own: set[str] = set()
    for node in graph.node:
        if node.name in before:
            region = before[node.name]
            region.produced |= own
            yield from region.repeat(num_places)
        if node.name in repeated:
            continue
        if own.intersection(node.input) or any(map(_is_own, node.input)):
            own.update(node.output)
            for place in range(num_places):
                yield _placed(node, place_suffix(place), own, {})
        else:
            yield node


def _regions(graph: GraphProto) -> Iterator[_Region]:
    """One for each layer; the nodes of a graph stand in the order they run in."""
    region: _Region | None = None
    for node in graph.node:
        if region is None:
            if _BEGINS in node.input:
                region = _Region([node], set(node.output))
        elif region.produced.intersection(node.input):
            if _ENDS in node.input:
                region.result, region.end = node.input[0], node.name
                yield region
                region = None
            else:
                region.nodes.append(node)
                region.produced.update(node.output)


def _forms(graph: GraphProto) -> Iterator[_Region]:
    """The `If` of each layer, whose first branch begins with the rows of the pass."""
    for at, node in enumerate(graph.node):
        if STACKED in node.input:
            branch = next(each.g for each in node.attribute if each.name == "then_branch")
            after = graph.node[at + 1].name
            yield _Region([node], set(node.output), node.output[0], after, branch.node[0].input[0])


def _repeated_values(
    values: Sequence[ValueInfoProto], num_places: int, own: Sequence[str]
) -> Iterator[ValueInfoProto]:
    for value in values:
        if not value.name.startswith(_CACHES) and value.name not in own:
            yield value
            continue
        for place in range(num_places):
            copy = ValueInfoProto()
            copy.CopyFrom(value)
            copy.name += place_suffix(place)
            for size in copy.type.tensor_type.shape.dim:
                if value.name in (_ENDS, OWN_ROWS):
                    size.dim_param = f"own{place_suffix(place)}"
                elif size.dim_param in _OWN_SIZES:
                    size.dim_param += place_suffix(place)
            yield copy


def _is_own(name: str) -> bool:
    return name in _OF_A_SESSION or name.startswith(_CACHES)
