"""A graph that computes in float16, made of one that computes in float32.

Matrices, attention and the cache become float16. Integers of quantized matrices stay where they
are, in the bundle's file; what is float32 beside them is rounded once, when the model is loaded.

Norms add up in float32 inside onnxruntime, and what they read may be too large for float16: of
Gemma 3, the residual stream is. Such a model keeps a wide stream: embeddings, residual sums and
norms stay float32, with a Cast before and after each matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_spec.core.config import ModelConfig
from edge_spec.errors import DeviceError
from edge_spec.runtimes.onnx_nodes import set_nodes

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
        set_nodes(self._graph, [each for node in self._graph.node for each in self._changed(node)])
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
