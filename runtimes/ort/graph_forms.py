"""Makes graphs in memory from a bundle's (exporters/onnx/graph.py), on the same weights file.

CUDA gets a graph for chains, as its attention refuses a mask. It has one form of attention and
experts, not the CPU's two (exporters/onnx/attention.py, experts.py), attends to a single row once,
and does not round activations to int8, which shifts logits by a tenth of their deviation or more.

CUDA's GroupQueryAttention takes no float32, so matrices, attention and cache become float16;
quantized integers stay. Residual streams may overflow float16, as Gemma 3's does: then embeddings,
residual sums and norms stay float32, with Casts around matrices.

On the CPU, features (`edge_spec.core.features`) are extra outputs, free if unbound:

    feature.N            [1, rows, hidden_size]   the residual stream that enters layer N
    feature.num_layers   [rows, hidden_size]      after the final norm, of all rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from edge_spec.core.config import ModelConfig
from edge_spec.errors import BundleError
from edge_spec.runtimes.ort.signature import BIAS, STACKED

_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16
_ALWAYS_HALF = (
    "MatMulNBits",
    "MatMul",
    "Gemm",
    "GroupQueryAttention",
    "RotaryEmbedding",
    "MoE",
    "QMoE",
)
_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
_LOOKUPS = ("GatherBlockQuantized",)
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")  # of queries and keys, for attention


class _Halving:
    """Turns a graph into float16, node by node in execution order. Weights become float16 by nodes
    that onnxruntime runs once, as it loads the graph."""

    def __init__(self, graph: GraphProto, is_wide: bool) -> None:
        self._graph = graph
        self._is_wide = is_wide
        self._types = {proto.name: proto.data_type for proto in graph.initializer}
        self._stored = frozenset(self._types)
        self._same: dict[str, str] = {}  # outputs of dropped casts to their inputs
        self._cast: dict[tuple[str, int], str] = {}  # value and type to the cast value

    def run(self) -> None:
        for value in self._graph.input:
            kind = value.type.tensor_type
            kind.elem_type = _HALF if kind.elem_type == _FLOAT else kind.elem_type
            self._types[value.name] = kind.elem_type
        set_nodes(self._graph, [each for node in self._graph.node for each in self._changed(node)])
        for value in self._graph.output:
            value.type.tensor_type.elem_type = self._types[value.name]

    def _changed(self, node: NodeProto) -> Iterator[NodeProto]:
        node.input[:] = [self._same.get(name, name) for name in node.input]
        if node.op_type == "Cast":
            yield from self._changed_cast(node)
            return
        floating = [at for at, name in enumerate(node.input) if self._is_floating(name)]
        kind = self._type_of(node, [node.input[at] for at in floating])
        for at in floating:
            name = node.input[at]
            if self._types[name] == kind:
                continue
            if (name, kind) not in self._cast:
                made = name + (".float16" if kind == _HALF else ".float32")
                self._cast[name, kind], self._types[made] = made, kind
                yield helper.make_node("Cast", [name], [made], made, to=kind)
            node.input[at] = self._cast[name, kind]
        for name in filter(None, node.output):
            self._types[name] = kind if floating else TensorProto.UNDEFINED
        yield node

    def _changed_cast(self, node: NodeProto) -> Iterator[NodeProto]:
        """Drop casts to float32, if the stream is wide only those of stored matrices."""
        source, target = node.input[0], node.output[0]
        to = next(each.i for each in node.attribute if each.name == "to")
        if to == _FLOAT and (source in self._stored or not self._is_wide):
            self._same[target] = source
            return
        self._types[target] = to
        yield node

    def _type_of(self, node: NodeProto, floating: list[str]) -> int:
        if node.op_type in _ALWAYS_HALF or not self._is_wide:
            return _HALF
        if node.op_type in _LOOKUPS:
            return _FLOAT
        if node.op_type in _NORMS:
            of_heads = any(name.endswith(_HEAD_NORMS) for name in node.input)
            return _HALF if of_heads else _FLOAT
        if node.op_type == "Gather" and floating[0] in self._stored:  # of an embedding
            return int(self._types[floating[0]])
        kinds = [self._types[name] for name in floating if name not in self._stored]
        return _FLOAT if _FLOAT in kinds else _HALF

    def _is_floating(self, name: str) -> bool:
        return self._types.get(name) in (_FLOAT, _HALF)


_EMBEDDED, _HIDDEN = "embedded", "hidden"  # as exported


def feature_name(layer: int) -> str:
    return f"feature.{layer}"


def feature_graph(path: Path, config: ModelConfig, layers: Iterable[int]) -> bytes:
    """Return a serialized ModelProto with features. Raises BundleError unless names are the
    exporter's."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    made_by = {output: node for node in graph.node for output in node.output}
    for layer in sorted(layers):
        name = feature_name(layer)
        shape: list[int | str] = ["rows", config.hidden_size]
        try:
            if layer == config.num_layers:
                node = _norm_of_all_rows(made_by, name)
            else:
                source = f"model.layers.{layer}.input_layernorm.sum" if layer else _EMBEDDED
                if source not in made_by:
                    raise KeyError(source)
                node, shape = helper.make_node("Identity", [source], [name], name), [1, *shape]
        except KeyError as missing:
            raise BundleError(
                f"{path} has no {missing} where features are expected",
                remedy="Export the model again.",
            ) from None
        graph.node.append(node)
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return bytes(model.SerializeToString())


def _norm_of_all_rows(made_by: Mapping[str, NodeProto], name: str) -> NodeProto:
    """Copy the node that makes "hidden", for all rows instead of the scored ones."""
    node = NodeProto()
    node.CopyFrom(made_by[_HIDDEN])
    node.name = name
    node.input[:2] = [made_by[each].input[0] for each in node.input[:2]]
    node.output[:] = [name]
    return node


_ATTENTION_ROWS = ("attention_rows", "kept_rows")  # inputs: rows that onnxruntime's CPU repeats
_OPSET = 21  # without the stacked form
_ATTENTION = "GroupQueryAttention"
_POSITIONS_INPUT, _BIAS_INPUT = 9, 10  # of the operator
_OF_FORMS = {STACKED, "cached_tokens", *_ATTENTION_ROWS, "position_ids", BIAS}  # inputs
_WINDOW = "window."  # prefix of nodes that make its bias


@dataclass(frozen=True)
class GraphForm:
    """How CUDA computes. has_wide_stream: residual stream and norms stay float32."""

    is_half: bool = False
    has_wide_stream: bool = False


FLOAT32 = GraphForm()  # the CPU's reference for it


# Not measured on a device.
def forms_for(config: ModelConfig) -> list[GraphForm]:
    """Return the forms to try on CUDA, fastest first."""
    wide = GraphForm(is_half=True, has_wide_stream=True)
    # Scaled embeddings and normed outputs of sublayers make streams that float16 may not hold.
    is_large = config.embedding_scale != 1.0 or config.norm_places != "before"
    return [wide] if is_large else [GraphForm(is_half=True), wide]


def formed_graph(path: Path, config: ModelConfig, form: GraphForm) -> bytes:
    """Return a serialized ModelProto."""
    model = onnx.load(str(path), load_external_data=False)
    _keep_general_forms(model)
    _take_chains(model.graph, config)
    _attend_once(model.graph)
    _keep_activations(model.graph)
    if form.is_half:
        _Halving(model.graph, form.has_wide_stream).run()
    drop_unread(model.graph, _OF_FORMS)
    return bytes(model.SerializeToString())


def _keep_general_forms(model: ModelProto) -> None:
    """Replace each `If` by its else branch, for any number of rows."""
    graph = model.graph
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes += inlined(node, "else_branch") if node.op_type == "If" else [node]
    set_nodes(graph, nodes)
    for opset in model.opset_import:
        if opset.domain == "":
            opset.version = _OPSET


def inlined(node: NodeProto, branch: str) -> list[NodeProto]:
    """Return an `If` branch's nodes, writing to the outputs of the `If`."""
    graph = next(each.g for each in node.attribute if each.name == branch)
    names = zip((value.name for value in graph.output), node.output, strict=True)
    return renamed(graph.node, dict(names))


def _attend_once(graph: GraphProto) -> None:
    """Drop the nodes that repeat rows around attention."""
    taken = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Gather" and node.input[1] in _ATTENTION_ROWS
    }
    kept = [node for node in graph.node if node.output[0] not in taken]
    set_nodes(graph, renamed(kept, taken))
    for value in graph.input:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == "attended":
                size.dim_param = "rows"


def set_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def drop_unread(graph: GraphProto, unwanted: Set[str]) -> None:
    """Drop unread weights and unread `unwanted` inputs."""
    read = {name for node in graph.node for name in node.input}
    inputs = [at for at, value in enumerate(graph.input) if value.name in unwanted - read]
    weights = [at for at, value in enumerate(graph.initializer) if value.name not in read]
    for values, unread in ((graph.input, inputs), (graph.initializer, weights)):
        for at in reversed(unread):
            del values[at]


def renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    nodes = list(nodes)
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return nodes


def _take_chains(graph: GraphProto, config: ModelConfig) -> None:
    """Leave masks, positions and windows to attention, which is right for chains."""
    layers = (node for node in graph.node if node.op_type == _ATTENTION)
    for layer, node in enumerate(layers):
        window = config.kind(layer).window
        if window is not None:
            node.attribute.append(onnx.helper.make_attribute("local_window_size", window))
        node.input[_POSITIONS_INPUT] = node.input[_BIAS_INPUT] = ""
    made = [node for node in graph.node if node.name.startswith(_WINDOW)]
    for node in made:
        graph.node.remove(node)


def _keep_activations(graph: GraphProto) -> None:
    """Drop accuracy_level, which lets kernels round activations."""
    for node in graph.node:
        kept = [each for each in node.attribute if each.name != "accuracy_level"]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)
