"""The graph of a bundle in the form that a device runs best, made when the model is loaded.

A bundle holds one graph (exporters/onnx/graph.py), as the CPU runs it. Others are made of it in
memory, over the same file of weights:

- attention and mixtures of experts in one form, where the graph has two for the sake of the CPU
  (exporters/onnx/stacked.py, experts.py): other devices know the operators;
- a single row attended once (`is_attended_once`): no `attention_rows` and `kept_rows`;
- for chains alone (`takes_trees` False): without `attention_bias`, with which CUDA takes neither
  flash attention nor a captured graph. The operator counts the rows of a window itself;
- rotated before attention (`is_rotated_apart`): WebGPU's attention ignores `position_ids`, which
  its RotaryEmbedding does not;
- float16 (`is_half`, half_graph.py): CUDA's GroupQueryAttention takes no float32;
- activations as they are (`keeps_activations`, and all of float16): the CPU rounds to int8 what a
  quantized matrix is multiplied with, which moves scores by a tenth of their deviation and more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.runtimes.onnx_nodes import (
    ATTENTION_ROWS,
    POSITIONS,
    attend_once,
    drop_unread,
    keep_general_forms,
    set_nodes,
)
from edge_spec.runtimes.ort.device_place import Place
from edge_spec.runtimes.ort.half_graph import halve, keeps_wide_stream, stored_values
from edge_spec.runtimes.ort.stacked import STACKED

_CONTRIB = "com.microsoft"
_ATTENTION = "GroupQueryAttention"
_BIAS, _BIAS_INPUT = "attention_bias", 10  # of the operator's inputs
_OF_FORMS = {STACKED, "cached_tokens", *ATTENTION_ROWS, _BIAS}  # inputs
_WINDOW = "window."  # begins the names of nodes that make its bias


@dataclass(frozen=True)
class GraphForm:
    """See the module. has_wide_stream: whether float16 stays out of the residual stream and its
    norms (half_graph.py)."""

    is_half: bool = False
    takes_trees: bool = True
    is_attended_once: bool = False
    is_rotated_apart: bool = False
    keeps_activations: bool = False
    has_wide_stream: bool = False


REFERENCE = GraphForm(keeps_activations=True)  # what devices are compared with


# By onnxruntime's names of providers. Not measured on any: no machine with one was at hand.
_FORMS: Mapping[str, GraphForm] = {
    "CUDAExecutionProvider": GraphForm(is_half=True, is_attended_once=True),
    "WebGpuExecutionProvider": GraphForm(
        is_attended_once=True, is_rotated_apart=True, keeps_activations=True
    ),
}


def forms_for(providers: Iterable[str], config: ModelConfig) -> list[GraphForm | None]:
    """Returns the forms to try on devices, the fastest first: for the first provider that has one
    of its own. None stands for the graph as it is stored."""
    form = next((_FORMS[name] for name in providers if name in _FORMS), None)
    if form is None or not form.is_half:
        return [form]
    if config.attention_sinks:  # which CUDA's attention takes without a bias alone
        form = replace(form, takes_trees=False)
    streams = [True] if keeps_wide_stream(config) else [False, True]
    return [replace(form, has_wide_stream=is_wide) for is_wide in streams]


@dataclass(frozen=True)
class FormedGraph:
    """A graph, and the weights that it takes in another type than their file has them in.

    They have to be given as external initializers, by name: SessionOptions'
    `add_external_initializers`.
    """

    graph: bytes  # a serialized ModelProto, which refers to the bundle's file of weights
    initializers: Mapping[str, np.ndarray]


def formed_graph(path: Path, config: ModelConfig, form: GraphForm) -> FormedGraph:
    """Makes `form` of the graph at `path`. Raises DeviceError where float16 cannot hold a
    weight."""
    model = onnx.load(str(path), load_external_data=False)
    keep_general_forms(model)
    if form.is_attended_once:
        attend_once(model.graph)
    if not form.takes_trees:
        _take_chains(model.graph, config)
    if form.is_rotated_apart:
        _rotate_apart(model.graph, config)
    if form.is_half or form.keeps_activations:
        _keep_activations(model.graph)
    made: Mapping[str, np.ndarray] = {}
    if form.is_half:
        made = halve(model, path, form.has_wide_stream)
    drop_unread(model.graph, _OF_FORMS)
    return FormedGraph(bytes(model.SerializeToString()), made)


def _take_chains(graph: GraphProto, config: ModelConfig) -> None:
    """Attention is causal by itself, and counts a window's rows right where they follow each
    other."""
    layers = (node for node in graph.node if node.op_type == _ATTENTION)
    for layer, node in enumerate(layers):
        window = config.kind(layer).window
        if window is not None:
            node.attribute.append(onnx.helper.make_attribute("local_window_size", window))
        node.input[_BIAS_INPUT] = ""
    made = [node for node in graph.node if node.name.startswith(_WINDOW)]
    for node in made:
        graph.node.remove(node)


def _rotate_apart(graph: GraphProto, config: ModelConfig) -> None:
    set_nodes(graph, [each for node in graph.node for each in _rotated(graph, node, config)])


def _rotated(graph: GraphProto, node: NodeProto, config: ModelConfig) -> Iterator[NodeProto]:
    """Yields the node, before it those that rotate its queries and keys."""
    rotates = next((each for each in node.attribute if each.name == "do_rotary"), None)
    if node.op_type != _ATTENTION or rotates is None or not rotates.i:
        yield node
        return
    prefix, (packed, *others) = node.output[0], node.input[:3]
    parts = [packed, *others]
    if others == ["", ""]:
        parts = [f"{prefix}.{part}" for part in "qkv"]
        sizes = np.array([config.query_size, config.kv_size, config.kv_size])
        constant = numpy_helper.from_array(sizes, f"{prefix}.sizes")
        graph.initializer.append(constant)
        yield onnx.helper.make_node("Split", [packed, constant.name], parts, parts[0], axis=-1)
    tables = list(node.input[7:9])
    for i, heads in enumerate((config.num_heads, config.num_kv_heads)):
        turned = f"{prefix}.{'qk'[i]}.rotated"
        partial: dict[str, Any] = {"num_heads": heads, "rotary_embedding_dim": config.rotated}
        yield onnx.helper.make_node(
            "RotaryEmbedding",
            [parts[i], POSITIONS, *tables],
            [turned],
            turned,
            domain=_CONTRIB,
            **(partial if config.rotated != config.head_dim else {}),
        )
        parts[i] = turned
    node.input[:3] = parts
    node.input[7:10] = ["", "", ""]
    rotates.i = 0
    yield node


def _keep_activations(graph: GraphProto) -> None:
    """Leaves out the least accuracy that the CPU's kernels are asked for."""
    for node in graph.node:
        kept = [each for each in node.attribute if each.name != "accuracy_level"]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)


_MATRIX = {"MatMulNBits": 1, "MatMul": 1}  # which input of an operator it is
_SHARED = (np.uint8, np.float16, np.float32)


class DeviceMatrices:
    """Those of one bundle, each copied when a graph first wants it."""

    def __init__(self, place: Place, path: Path) -> None:
        """path: of the graph beside whose file they are."""
        self._place = place
        self._path = path
        # What owns its buffer is not taken as an initializer: beside each its owner.
        self._held: dict[str, tuple[OrtValue, OrtValue]] = {}

    def given(self, formed: FormedGraph) -> dict[str, OrtValue]:
        """Returns the matrices of a graph, by name.

        onnxruntime takes them as they are in place of the file's (`add_external_initializers`)
        where they lie where it wants them, and otherwise copies them.
        """
        model = onnx.load_model_from_string(formed.graph)
        stored = {
            proto.name: proto
            for proto in model.graph.initializer
            if proto.data_location == TensorProto.EXTERNAL
            and helper.tensor_dtype_to_np_dtype(proto.data_type) in _SHARED
        }
        found = {}
        for node in model.graph.node:
            name = node.input[_MATRIX[node.op_type]] if node.op_type in _MATRIX else ""
            if name not in stored:
                continue
            if name not in self._held:
                made = formed.initializers.get(name)
                values = stored_values(stored[name], self._path) if made is None else made
                owner = OrtValue.ortvalue_from_numpy(
                    np.ascontiguousarray(values), self._place.device, self._place.number
                )
                self._held[name] = OrtValue.from_dlpack(owner), owner
            found[name] = self._held[name][0]
        return found
