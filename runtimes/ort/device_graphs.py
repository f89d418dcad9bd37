"""Small ONNX models that copy a cache on its own device, each loaded once for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

if TYPE_CHECKING:
    import onnxruntime

_OPSET, _SCATTER_OPSET, _IR_VERSION = 17, 24, 10  # TensorScatter is of 24
_Values = Sequence[tuple[str, int, Sequence[int | str]]]  # name, type, shape

CACHE = ("parts", "capacity", "size")  # [1, layers * 2 * kv_heads, tokens, head_dim]


class DeviceGraphs:
    """Computes on a provider what goes on beside the model, for caches and masks of one type.

    pad: `array` [a, b, c, d] with zeros before and after it, as `pads` [8] int64 counts them.
    move: `cache` with the tokens at `rows` [k] int64 copied to `at` [1] int64 and after; in place
    where `moved` is bound to the same buffer. take: the first `length` [1] int64 tokens.
    """

    def __init__(self, load: Callable[[bytes], Any], element: np.dtype[Any]) -> None:
        """load: returns an InferenceSession of a serialized model. Raises what it raises."""
        kind = helper.np_dtype_to_tensor_dtype(element)
        self.pad: onnxruntime.InferenceSession = load(_pad(kind))
        self.move: onnxruntime.InferenceSession = load(_move(kind))
        self.take: onnxruntime.InferenceSession = load(_take(kind))


def _pad(kind: int) -> bytes:
    inputs: _Values = [("array", kind, [*"abcd"]), ("pads", TensorProto.INT64, [8])]
    outputs: _Values = [("padded", kind, [*"efgh"])]
    return _model([helper.make_node("Pad", ["array", "pads"], ["padded"])], inputs, outputs)


def _move(kind: int) -> bytes:
    nodes = [
        helper.make_node("Gather", ["cache", "rows"], ["kept"], axis=2),
        helper.make_node("TensorScatter", ["cache", "kept", "at"], ["moved"], axis=2),
    ]
    inputs: _Values = [
        ("cache", kind, [1, *CACHE]),
        ("rows", TensorProto.INT64, ["rows"]),
        ("at", TensorProto.INT64, [1]),
    ]
    return _model(nodes, inputs, [("moved", kind, [1, *CACHE])], _SCATTER_OPSET)


def _take(kind: int) -> bytes:
    constants = [
        helper.make_node("Constant", [], [name], value_ints=[value])
        for name, value in (("start", 0), ("axis", 2))
    ]
    taking = helper.make_node("Slice", ["cache", "start", "length", "axis"], ["taken"])
    inputs: _Values = [("cache", kind, [1, *CACHE]), ("length", TensorProto.INT64, [1])]
    outputs: _Values = [("taken", kind, [1, "parts", "tokens", "size"])]
    return _model([*constants, taking], inputs, outputs)


def _model(
    nodes: Sequence[NodeProto], inputs: _Values, outputs: _Values, opset: int = _OPSET
) -> bytes:
    graph = helper.make_graph(nodes, "edge-spec", _described(inputs), _described(outputs))
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR_VERSION
    )
    serialized: bytes = model.SerializeToString()
    return serialized


def _described(values: _Values) -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, list(shape)) for name, kind, shape in values]
