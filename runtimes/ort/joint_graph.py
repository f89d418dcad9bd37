"""The graph of a model for passes that several sessions share: one attention for each of them.

Made from the graph of exporters/onnx/graph.py when it is first wanted. What depends on the inputs
of one session, which is attention alone, is repeated for each place of a session, with a suffix to
its names; so are these inputs, and the caches. All products stay as they are, over the rows of all
sessions side by side. A session's attention is then the very operator of a pass of its own, of the
same shapes: its scores are the same bit for bit where those of rows in passes of different widths
are.

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
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.errors import BundleError
from edge_spec.runtimes.ort.signature import STACKED

OWN_ROWS = "own_rows"
_ENDS = "kept_rows"  # an input of the node after attention
_OF_A_SESSION = (
    "attention_rows",
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
    """Return the end of the names of one session's inputs, outputs and nodes."""
    return f"@{place}"


def joint_graph(path: Path, num_places: int) -> bytes:
    """Return a serialized ModelProto that refers to the same file of weights.

    Raises BundleError for a graph without the nodes that it is divided at."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    if not any({STACKED, _ENDS}.intersection(node.input) for node in graph.node):
        raise BundleError(
            f"{path} has no attention that sessions could share a pass around",
            remedy="Export the model again.",
        )
    suffixes = [place_suffix(place) for place in range(num_places)]
    has_forms = any(value.name == STACKED for value in graph.input)
    inputs, own = list(graph.input), list(_OF_A_SESSION)
    if has_forms:
        inputs.append(helper.make_tensor_value_info(OWN_ROWS, TensorProto.INT64, ["own"]))
        own.append(_ENDS)
    nodes = list(_repeated_nodes(graph, suffixes))
    taken = list(_repeated_values(inputs, suffixes, own))
    if has_forms:
        taken.append(helper.make_tensor_value_info(_ENDS, TensorProto.INT64, ["rows"]))
    given = list(_repeated_values(graph.output, suffixes, own))
    for field, values in ((graph.node, nodes), (graph.input, taken), (graph.output, given)):
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(kept)
    return bytes(model.SerializeToString())


def _repeated_nodes(graph: GraphProto, suffixes: Sequence[str]) -> Iterator[NodeProto]:
    """Yield the nodes of the graph, once for each place what a session's inputs lead to, until the
    node that takes the rows of all places. Nodes are in the order they run in."""
    own: set[str] = set()
    for node in graph.node:
        if STACKED in node.input:
            yield from _repeated_forms(node, suffixes)
            own.update(node.output[1:])  # caches
        elif _ENDS in node.input:
            yield _joined(node.input[0], node.input[0], suffixes)
            yield node
        elif own.intersection(node.input) or any(map(_is_own, node.input)):
            own.update(filter(None, node.output))
            for suffix in suffixes:
                yield _placed(node, suffix, own, {})
        else:
            yield node


def _repeated_forms(node: NodeProto, suffixes: Sequence[str]) -> Iterator[NodeProto]:
    """Repeat an `If` of both forms, each over its own rows of what its branches begin with."""
    result, produced = node.output[0], set(node.output)
    branch = next(each.g for each in node.attribute if each.name == "then_branch")
    rows = branch.node[0].input[0]
    for suffix in suffixes:
        own = f"{result}.{OWN_ROWS}{suffix}"
        yield helper.make_node("Gather", [rows, OWN_ROWS + suffix], [own], own, axis=1)
        yield _placed(node, suffix, produced, {rows: own, _ENDS: _ENDS + suffix})
    joined = f"{result}.joined"
    yield _joined(result, joined, suffixes)
    yield helper.make_node("Gather", [joined, _ENDS], [result], result, axis=1)


def _joined(result: str, name: str, suffixes: Sequence[str]) -> NodeProto:
    parts = [result + suffix for suffix in suffixes]
    return helper.make_node("Concat", parts, [name], name, axis=1)


def _placed(
    node: NodeProto, suffix: str, produced: set[str], renamed: Mapping[str, str]
) -> NodeProto:
    """Copy a node for one place: what is produced there, and a session's inputs, get the suffix."""
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
            branch = attribute.g
            inner = produced.union(*(each.output for each in branch.node))
            nodes = [_placed(each, suffix, inner, renamed) for each in branch.node]
            del branch.node[:]
            branch.node.extend(nodes)
            for value in branch.output:
                value.name += suffix
    return copy


def _repeated_values(
    values: Sequence[ValueInfoProto], suffixes: Sequence[str], own: Sequence[str]
) -> Iterator[ValueInfoProto]:
    for value in values:
        if not value.name.startswith(_CACHES) and value.name not in own:
            yield value
            continue
        for suffix in suffixes:
            copy = ValueInfoProto()
            copy.CopyFrom(value)
            copy.name += suffix
            for size in copy.type.tensor_type.shape.dim:
                if value.name in (_ENDS, OWN_ROWS):
                    size.dim_param = f"own{suffix}"
                elif size.dim_param in _OWN_SIZES:
                    size.dim_param += suffix
            yield copy


def _is_own(name: str) -> bool:
    return name in _OF_A_SESSION or name.startswith(_CACHES)
