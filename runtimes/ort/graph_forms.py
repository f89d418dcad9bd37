"""The graph of a bundle in the form that a device runs best, made when the model is loaded.

A bundle holds one graph (exporters/onnx/graph.py), as the CPU runs it. Others are made of it in
memory, over the same file of weights:

- attention and mixtures of experts in one form, where the graph has two for the sake of the CPU
  (exporters/onnx/attention.py, experts.py): other devices know the operators;
- a single row attended once (`is_attended_once`): no `attention_rows` and `kept_rows`;
- for chains alone (`takes_trees` False): without `attention_bias`, with which CUDA takes neither
  flash attention nor a captured graph. The operator counts the rows of a window itself;
- rotated before attention (`is_rotated_apart`): WebGPU's attention ignores `position_ids`, which
  its RotaryEmbedding does not;
- float16 (`is_half`): CUDA's GroupQueryAttention takes no float32;
- activations as they are (`keeps_activations`, and all of float16): the CPU rounds to int8 what a
  quantized matrix is multiplied with, which moves scores by a tenth of their deviation and more.

A graph that computes in float16, made of one that computes in float32.

Matrices, attention and the cache become float16. Integers of quantized matrices stay where they
are, in the bundle's file; what is float32 beside them is rounded once, when the model is loaded.

Norms add up in float32 inside onnxruntime, and what they read may be too large for float16: of
Gemma 3, the residual stream is. Such a model keeps a wide stream: embeddings, residual sums and
norms stay float32, with a Cast before and after each matrix.

The graph of a model that also gives features (`edge_spec.core.features`), as further outputs.

Made from the graph of exporters/onnx/graph.py when a session first asks, over the same file of
weights: residual streams are there under the exporter's names, and are merely given out.

    feature.N            [1, rows, hidden_size]   the residual stream that enters layer N
    feature.num_layers   [rows, hidden_size]      after the final norm: of all rows, not only of
                                                  those that reach the head

An output that is not bound to a buffer is not copied anywhere, so that passes which want none run
at the pace of the graph without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.errors import BundleError, DeviceError
from edge_spec.runtimes.ort.device_memory import Place
from edge_spec.runtimes.ort.signature import STACKED

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
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")  # of queries and keys, which attention takes
_INLINE_BYTES = 1024
_SUFFIX = ".float16"


def keeps_wide_stream(config: ModelConfig) -> bool:
    """Returns whether the description tells of a residual stream that float16 may not hold: one of
    scaled embeddings, or with norms of what sublayers add to it."""
    return config.embedding_scale != 1.0 or config.norm_places != "before"


def halve(model: ModelProto, path: Path, is_wide: bool) -> dict[str, np.ndarray]:
    """Changes the model, read from `path` without its weights, and returns the float16 weights that
    it takes as external initializers. Raises DeviceError for a weight that float16 cannot hold."""
    return _Halving(model, path, is_wide).run()


class _Halving:
    """One pass over the nodes, in the order they run in; `_types` has what each value is by now."""

    def __init__(self, model: ModelProto, path: Path, is_wide: bool) -> None:
        self._graph = model.graph
        self._path = path
        self._is_wide = is_wide
        self._stored = {proto.name: proto for proto in self._graph.initializer}
        self._types = {name: proto.data_type for name, proto in self._stored.items()}
        self._same: dict[str, str] = {}  # casts that are left out, by what they gave
        self._cast: dict[tuple[str, int], str] = {}  # of a value to a type
        self._made: dict[str, np.ndarray] = {}

    def run(self) -> dict[str, np.ndarray]:
        for value in self._graph.input:
            kind = value.type.tensor_type
            kind.elem_type = _HALF if kind.elem_type == _FLOAT else kind.elem_type
            self._types[value.name] = kind.elem_type
        _set_nodes(self._graph, [each for node in self._graph.node for each in self._changed(node)])
        for value in self._graph.output:
            value.type.tensor_type.elem_type = self._types[value.name]
        return self._made

    def _changed(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yields the node, before it the casts that it needs."""
        node.input[:] = [self._same.get(name, name) for name in node.input]
        if node.op_type == "Cast":
            yield from self._changed_cast(node)
            return
        floating = [at for at, name in enumerate(node.input) if self._is_floating(name)]
        kind = self._type_of(node, [node.input[at] for at in floating])
        for at in floating:
            name = node.input[at]
            if self._types[name] != kind:
                yield from self._convert(name, kind)
                node.input[at] = self._cast[name, kind]
        for name in filter(None, node.output):
            self._types[name] = kind if floating else TensorProto.UNDEFINED
        yield node

    def _changed_cast(self, node: NodeProto) -> Iterator[NodeProto]:
        """A stored float16 matrix is not widened any more."""
        source, target = node.input[0], node.output[0]
        to = next(each.i for each in node.attribute if each.name == "to")
        if to == _FLOAT and (source in self._stored or not self._is_wide):
            self._same[target] = source
            return
        self._types[target] = to
        yield node

    def _type_of(self, node: NodeProto, floating: list[str]) -> int:
        """Returns the type a node computes in: a stream's, or that of what it reads."""
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

    def _convert(self, name: str, kind: int) -> Iterator[NodeProto]:
        """Has `_cast` tell the name of a value in another type; yields a node that makes it."""
        if (name, kind) in self._cast:
            return
        if kind == _HALF and name in self._stored:
            self._cast[name, kind] = self._store(name)
            return
        made = name + (_SUFFIX if kind == _HALF else ".float32")
        self._cast[name, kind], self._types[made] = made, kind
        yield helper.make_node("Cast", [name], [made], made, to=kind)

    def _store(self, name: str) -> str:
        """Adds the float16 form of a weight."""
        values = stored_values(self._stored[name], self._path)
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        if not np.array_equal(np.isinf(rounded), np.isinf(values)):
            raise DeviceError(
                f"{self._path}: {name} has weights that float16 cannot hold",
                remedy="Choose --device cpu.",
            )
        made = name + _SUFFIX
        if rounded.nbytes <= _INLINE_BYTES:
            proto = numpy_helper.from_array(rounded, made)
        else:
            self._made[made] = rounded
            proto = _external(made, rounded, self._stored[name])
        self._graph.initializer.append(proto)
        self._stored[made], self._types[made] = proto, _HALF
        return made


def stored_values(proto: TensorProto, path: Path) -> np.ndarray:
    """Returns the values of a weight of the graph at `path`; those of the file are mapped."""
    if proto.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(proto)
    stated = {each.key: each.value for each in proto.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(proto.data_type)
    file, offset = path.parent / stated["location"], int(stated.get("offset", 0))
    return np.memmap(file, dtype, "r", offset, tuple(proto.dims))


def _external(name: str, values: np.ndarray, like: TensorProto) -> TensorProto:
    """A tensor whose bytes are given beside the graph, in the place of a file's."""
    proto = TensorProto(
        name=name, dims=values.shape, data_type=_HALF, data_location=TensorProto.EXTERNAL
    )
    location = next((each.value for each in like.external_data if each.key == "location"), name)
    proto.external_data.add(key="location", value=location)
    return proto


_EMBEDDED, _HIDDEN = "embedded", "hidden"  # as the exporter calls them


def feature_name(layer: int) -> str:
    """Returns the name of the output that gives a layer's features."""
    return f"feature.{layer}"


def feature_graph(path: Path, config: ModelConfig, layers: Iterable[int]) -> bytes:
    """Returns a serialized ModelProto that refers to the same file of weights.

    Raises BundleError for a graph whose streams have other names than the exporter gives them now.
    """
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    for layer in sorted(layers):
        name = feature_name(layer)
        shape: list[int | str] = ["rows", config.hidden_size]
        if layer == config.num_layers:
            node = _final_norm(graph, path, name)
        else:
            node, shape = _stream(graph, path, layer, name), [1, *shape]
        graph.node.append(node)
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return bytes(model.SerializeToString())


def _stream(graph: GraphProto, path: Path, layer: int, name: str) -> NodeProto:
    """Returns what gives out the residual stream that enters a layer."""
    source = f"model.layers.{layer}.input_layernorm.sum" if layer else _EMBEDDED
    if not any(source in node.output for node in graph.node):
        raise _unknown(path, source)
    return helper.make_node("Identity", [source], [name], name)


def _final_norm(graph: GraphProto, path: Path, name: str) -> NodeProto:
    """The node that makes "hidden" of the rows that reach the head, for all rows."""
    made_by = {output: node for node in graph.node for output in node.output}
    norm = made_by.get(_HIDDEN)
    picked = [] if norm is None else [made_by.get(each) for each in norm.input[:2]]
    if norm is None or any(each is None or each.op_type != "Gather" for each in picked):
        raise _unknown(path, _HIDDEN)
    node = NodeProto()
    node.CopyFrom(norm)
    node.name = name
    node.input[:2] = [each.input[0] for each in picked if each is not None]
    node.output[:] = [name]
    return node


def _unknown(path: Path, name: str) -> BundleError:
    return BundleError(
        f"{path} has no {name} where features are expected", remedy="Export the model again."
    )


_POSITIONS = "position_ids"
_ATTENTION_ROWS = ("attention_rows", "kept_rows")  # inputs: rows that onnxruntime's CPU repeats
_OPSET = 21  # of all nodes but those of the stacked form; few devices know newer ones
_CONTRIB = "com.microsoft"
_ATTENTION = "GroupQueryAttention"
_BIAS, _BIAS_INPUT = "attention_bias", 10  # of the operator's inputs
_OF_FORMS = {STACKED, "cached_tokens", *_ATTENTION_ROWS, _BIAS}  # inputs
_WINDOW = "window."  # begins the names of nodes that make its bias


@dataclass(frozen=True)
class GraphForm:
    """See the module. has_wide_stream: whether float16 stays out of the residual stream and its
    norms."""

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
    _keep_general_forms(model)
    if form.is_attended_once:
        _attend_once(model.graph)
    if not form.takes_trees:
        _take_chains(model.graph, config)
    if form.is_rotated_apart:
        _rotate_apart(model.graph, config)
    if form.is_half or form.keeps_activations:
        _keep_activations(model.graph)
    made: Mapping[str, np.ndarray] = {}
    if form.is_half:
        made = halve(model, path, form.has_wide_stream)
    _drop_unread(model.graph, _OF_FORMS)
    return FormedGraph(bytes(model.SerializeToString()), made)


def _keep_general_forms(model: ModelProto) -> None:
    """Replaces each `If` by the nodes of its second branch, which suits any number of rows."""
    graph = model.graph
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type != "If":
            nodes.append(node)
            continue
        branch = next(each.g for each in node.attribute if each.name == "else_branch")
        names = zip((value.name for value in branch.output), node.output, strict=True)
        nodes += _renamed(branch.node, dict(names))
    _set_nodes(graph, nodes)
    for opset in model.opset_import:
        if opset.domain == "":
            opset.version = _OPSET


def _attend_once(graph: GraphProto) -> None:
    """Drops the nodes that repeat rows before attention and drop them after it."""
    taken = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Gather" and node.input[1] in _ATTENTION_ROWS
    }
    kept = [node for node in graph.node if node.output[0] not in taken]
    for node in kept:
        if list(node.input) == [_POSITIONS] and node.op_type == "Squeeze":
            graph.initializer.append(numpy_helper.from_array(np.array([0]), "first_axis"))
            node.input.append("first_axis")  # one row stays a row
    _set_nodes(graph, _renamed(kept, taken))
    for value in graph.input:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == "attended":
                size.dim_param = "rows"


def _set_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Gives a graph these nodes, which may be its own."""
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _drop_unread(graph: GraphProto, unwanted: Set[str]) -> None:
    """Drops weights that no node reads, and so those of the `unwanted` inputs."""
    read = {name for node in graph.node for name in node.input}
    inputs = [at for at, value in enumerate(graph.input) if value.name in unwanted - read]
    weights = [at for at, value in enumerate(graph.initializer) if value.name not in read]
    for values, unread in ((graph.input, inputs), (graph.initializer, weights)):
        for at in reversed(unread):
            del values[at]


def _renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    nodes = list(nodes)
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return nodes


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
    _set_nodes(graph, [each for node in graph.node for each in _rotated(graph, node, config)])


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
            [parts[i], _POSITIONS, *tables],
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
