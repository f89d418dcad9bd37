"""Makes a bundle's graph into what OpenVINO reads, over the bundle's own file of weights.

- Every weight becomes a node `Weight`, which OpenVINO's frontend is told to make a constant of
  that lies where the file is mapped: graphs given as bytes may not name files elsewhere.
- Where attention or experts stand in two forms for the sake of onnxruntime's CPU, the general one
  is kept.
- GroupQueryAttention becomes standard operators (attention.py), which do not write the cache.
- The embedding's rows are taken before they are widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from edge_spec.core.config import ModelConfig
from edge_spec.errors import UnsupportedModelError
from edge_spec.runtimes.onnx_nodes import (
    ATTENTION_ROWS,
    attend_once,
    drop_unread,
    keep_general_forms,
    set_nodes,
)
from edge_spec.runtimes.openvino.attention import Attention

DOMAIN, WEIGHT = "edge_spec", "Weight"
_UNREAD = {*ATTENTION_ROWS, "seqlens_k", "total_sequence_length", "stacked", "cached_tokens"}


@dataclass(frozen=True)
class Rewritten:
    """A serialized ModelProto, and what its nodes `Weight` stand for, by name, mapped from the
    file."""

    graph: bytes
    weights: dict[str, np.ndarray]


def rewrite(path: Path, config: ModelConfig) -> Rewritten:
    """Raises UnsupportedModelError for a form of weights that OpenVINO is not given."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    keep_general_forms(model)
    attend_once(graph)
    attention = Attention(graph, config)
    nodes = [made for node in graph.node for made in _replaced(graph, node, attention)]
    set_nodes(graph, [*attention.shared, *nodes])
    _name_own_rows(graph)
    _drop_unread(graph)
    weights = _mapped(graph, path)
    stated = [
        helper.make_node(WEIGHT, [], [name], name, domain=DOMAIN, key=name) for name in weights
    ]
    set_nodes(graph, [*stated, *graph.node])
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return Rewritten(bytes(model.SerializeToString()), weights)


def _replaced(graph: GraphProto, node: NodeProto, attention: Attention) -> Iterator[NodeProto]:
    if node.op_type == "GroupQueryAttention":
        yield from attention.replace(node)
    elif node.op_type == "GatherBlockQuantized":
        yield from _taken_rows(graph, node)
    else:
        yield node


def _taken_rows(graph: GraphProto, node: NodeProto) -> Iterator[NodeProto]:
    """Yields what takes rows of a matrix of bytes, whose blocks have a scale each, and a zero
    point, which is 128 where none is stated."""
    packed, ids, scales, *zeros = node.input
    bits = next(each.i for each in node.attribute if each.name == "bits")
    if bits != 8:
        raise UnsupportedModelError(
            f"openvino is not given an embedding of {bits} bits", remedy="Choose --runtime ort."
        )
    flat = next(each for each in graph.node if each.output[0] == packed)  # its Reshape
    table = next(each for each in graph.initializer if each.name == flat.input[0])
    _, blocks, size = table.dims
    output = node.output[0]
    for name, value in (
        ("zero", np.array(128, np.float32)),
        ("last", np.array([-1])),
        ("shape", np.array([1, -1, blocks * size])),
        ("by_block", np.array([1, -1, blocks, size])),
    ):
        graph.initializer.append(numpy_helper.from_array(value, f"{output}.{name}"))
    yield _node("Gather", [flat.input[0], ids], f"{output}.taken", axis=0)
    yield _node("Reshape", [f"{output}.taken", f"{output}.by_block"], f"{output}.split")
    yield _node("Cast", [f"{output}.split"], f"{output}.wide", to=TensorProto.FLOAT)
    zero = f"{output}.zero"
    if zeros:
        zero = f"{output}.zeros"
        yield _node("Gather", [zeros[0], ids], f"{zero}.taken", axis=0)
        yield _node("Unsqueeze", [f"{zero}.taken", f"{output}.last"], f"{zero}.column")
        yield _node("Cast", [f"{zero}.column"], zero, to=TensorProto.FLOAT)
    yield _node("Sub", [f"{output}.wide", zero], f"{output}.centred")
    yield _node("Gather", [scales, ids], f"{output}.scales", axis=0)
    yield _node("Unsqueeze", [f"{output}.scales", f"{output}.last"], f"{output}.column")
    yield _node("Mul", [f"{output}.centred", f"{output}.column"], f"{output}.blocks")
    yield _node("Reshape", [f"{output}.blocks", f"{output}.shape"], output)


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], output, **attributes)


def _name_own_rows(graph: GraphProto) -> None:
    """Describes what attention returns: the keys and values of a pass's own rows."""
    for value in graph.output:
        if value.name.startswith("present."):
            value.type.tensor_type.shape.dim[2].dim_param = "rows"


def _drop_unread(graph: GraphProto) -> None:
    """Drops weights, nodes of tables and inputs that nothing reads any more."""
    outputs = {value.name for value in graph.output}
    while True:
        read = {name for node in graph.node for name in node.input} | outputs
        kept = [node for node in graph.node if read & set(node.output)]
        if len(kept) == len(graph.node):
            break
        set_nodes(graph, kept)
    drop_unread(graph, _UNREAD)


def _mapped(graph: GraphProto, path: Path) -> dict[str, np.ndarray]:
    """Returns the weights that stand in the graph's file of weights, and drops them from it."""
    found: dict[str, np.ndarray] = {}
    files: dict[str, np.ndarray] = {}
    for at in reversed(range(len(graph.initializer))):
        stored = graph.initializer[at]
        if stored.data_location != TensorProto.EXTERNAL:
            continue
        told = {entry.key: entry.value for entry in stored.external_data}
        name = Path(told["location"]).name  # the bundle has no folders
        if name not in files:
            files[name] = np.memmap(path.parent / name, np.uint8, "c")
        start = int(told.get("offset", 0))
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(stored.data_type))
        size = int(np.prod(stored.dims)) * kind.itemsize
        found[stored.name] = files[name][start : start + size].view(kind).reshape(stored.dims)
        del graph.initializer[at]
    return found
