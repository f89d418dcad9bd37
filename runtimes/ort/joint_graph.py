"""The graph for passes that several sessions share, with attention for each.

Attention of exporters/onnx/graph.py is repeated for each session's place, with a suffix to names of
inputs and caches; products take all rows. Attention is the operator of a session's own pass, on the
same shapes: scores are bit-identical to that pass wherever rows agree across widths of passes.

    attention_rows@P   [attended] int64   the pass's row that each attended row of place P repeats
    kept_rows          [rows] int64       the attended row, over all places, for each row
    own_rows@P         [own] int64        the rows of place P, if attention has two forms
                                          (exporters/onnx/attention.py): that for few rows stays
    ...@P                                 attention's other inputs, as in a session's own pass
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from edge_spec.errors import BundleError
from edge_spec.runtimes.ort.graph_forms import drop_unread, inlined, renamed, set_nodes
from edge_spec.runtimes.ort.signature import STACKED

OWN_ROWS = "own_rows"
_ENDS = "kept_rows"  # input of the node after attention
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
_OWN_SIZES = ("attended", "total", "capacity", "slots", "own")


def place_suffix(place: int) -> str:
    """Return the suffix of a place's names."""
    return f"@{place}"


def joint_graph(path: Path, num_places: int) -> bytes:
    """Return a serialized ModelProto on the same weights. Raises BundleError for a graph without
    the nodes to split at."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    suffixes = [place_suffix(place) for place in range(num_places)]
    if any(value.name == STACKED for value in graph.input):
        graph.input.append(helper.make_tensor_value_info(OWN_ROWS, TensorProto.INT64, ["own"]))
        set_nodes(graph, _keep_stacked_forms(graph.node))
        drop_unread(graph, set(_OF_A_SESSION))
    if not any(_ENDS in node.input for node in graph.node):
        raise BundleError(
            f"{path} has no attention that sessions could share a pass around",
            remedy="Export the model again.",
        )
    set_nodes(graph, _repeated_nodes(graph.node, suffixes))
    for values in (graph.input, graph.output):
        kept = list(_repeated_values(values, suffixes))
        del values[:]
        values.extend(kept)
    return bytes(model.SerializeToString())


def _keep_stacked_forms(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Replace each `If` of attention's forms by the first, over a place's own rows."""
    for node in nodes:
        if STACKED not in node.input:
            yield node
            continue
        inner, result = inlined(node, "then_branch"), node.output[0]
        rows, own, mixed = inner[0].input[0], f"{result}.{OWN_ROWS}", f"{result}.mixed"
        yield helper.make_node("Gather", [rows, OWN_ROWS], [own], own, axis=1)
        yield from renamed(inner, {rows: own, result: mixed})
        yield helper.make_node("Gather", [mixed, _ENDS], [result], result, axis=1)


def _repeated_nodes(nodes: Iterable[NodeProto], suffixes: Sequence[str]) -> Iterator[NodeProto]:
    """Repeat for each place the nodes that depend on a session's inputs, up to the one that takes
    all places' rows. Nodes are in execution order."""
    own: set[str] = set()
    for node in nodes:
        if _ENDS in node.input:
            joined = node.input[0]
            parts = [joined + suffix for suffix in suffixes]
            yield helper.make_node("Concat", parts, [joined], joined, axis=1)
            yield node
        elif own.intersection(node.input) or any(map(_is_own, node.input)):
            own.update(filter(None, node.output))
            for suffix in suffixes:
                yield _placed(node, suffix, own)
        else:
            yield node


def _placed(node: NodeProto, suffix: str, produced: set[str]) -> NodeProto:
    """Copy a node for a place, with the suffix on what depends on its session."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name += suffix
    copy.input[:] = [
        name + suffix if name in produced or _is_own(name) else name for name in node.input
    ]
    copy.output[:] = [name + suffix if name else name for name in node.output]
    return copy


def _repeated_values(
    values: Iterable[ValueInfoProto], suffixes: Sequence[str]
) -> Iterator[ValueInfoProto]:
    for value in values:
        if not _is_own(value.name):
            yield value
            continue
        for suffix in suffixes:
            copy = ValueInfoProto()
            copy.CopyFrom(value)
            copy.name += suffix
            for size in copy.type.tensor_type.shape.dim:
                if size.dim_param in _OWN_SIZES:
                    size.dim_param += suffix
            yield copy


def _is_own(name: str) -> bool:
    return name in _OF_A_SESSION or name.startswith(_CACHES)
