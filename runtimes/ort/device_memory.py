"""Buffers in a device's own memory, and what is copied to and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from onnx import NodeProto, TensorProto, ValueInfoProto, helper
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.runtimes.ort.devices import ProviderChoice
from edge_spec.runtimes.ort.signature import bind_output

# Providers with memory of their own, and what onnxruntime's OrtValue calls it where it has
# addresses. None: it has none, so that they compute on copies of what is in main memory.
_MEMORIES = {"CUDAExecutionProvider": "cuda", "WebGpuExecutionProvider": None}
FIRST_TOKENS = 512


class Place(NamedTuple):
    """Memory as onnxruntime names it. is_copied: it is main memory, of which every pass has to be
    given a copy."""

    device: str
    number: int  # of several such devices
    is_copied: bool = False


def place_of(chosen: Iterable[ProviderChoice]) -> Place | None:
    """Returns the place for providers in their order; None: they compute in main memory."""
    choice = with_memory(chosen)
    if choice is None:
        return None
    memory = _MEMORIES[choice.provider]
    if memory is None:
        return Place("cpu", 0, is_copied=True)
    return Place(memory, int(choice.options.get("device_id", "0")))


def shares_weights(place: Place, config: ModelConfig) -> bool:
    """Returns whether graphs of a model share its large weights there: those of experts are not."""
    return not place.is_copied and config.experts is None


def with_memory(chosen: Iterable[ProviderChoice]) -> ProviderChoice | None:
    """Returns the first that has memory of its own."""
    return next((choice for choice in chosen if choice.provider in _MEMORIES), None)


def capacity_for(needed: int, capacity: int, context_length: int) -> int:
    """Returns for how many tokens a cache has room that had it for `capacity`: it doubles."""
    room = max(FIRST_TOKENS, capacity)
    while room < needed:
        room *= 2
    return min(room, context_length)


_ELEMENTS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class DeviceMemory:
    """Holds what sessions have on a device.

    onnxruntime copies an array of the host when it is bound, and only then: what is bound as an
    input is never written to afterwards.
    """

    def __init__(self, place: Place, graphs: DeviceGraphs) -> None:
        self.place = place
        self._graphs = graphs

    @property
    def address(self) -> tuple[str, int]:
        """Names the device as OrtValue and IOBinding take it."""
        return self.place.device, self.place.number

    def bind_unread(self, binding: onnxruntime.IOBinding, name: str) -> None:
        """An output that stays on the device, where the next one takes its place."""
        binding.bind_output(name, *self.address)

    def padded(
        self, array: np.ndarray | OrtValue, before: Sequence[int], after: Sequence[int]
    ) -> OrtValue:
        """Returns a new buffer with zeros around `array`, of four axes, from the host or here."""
        shape = array.shape if isinstance(array, np.ndarray) else array.shape()
        wider = [sum(sizes) for sizes in zip(before, shape, after, strict=True)]
        kind = np.dtype(array.dtype if isinstance(array, np.ndarray) else _element(array))
        made = OrtValue.ortvalue_from_shape_and_type(wider, kind.type, *self.address)
        binding = self._graphs.pad.io_binding()
        if isinstance(array, np.ndarray):
            binding.bind_cpu_input("array", array)
        else:
            binding.bind_ortvalue_input("array", array)
        binding.bind_cpu_input("pads", np.array([*before, *after], np.int64))
        binding.bind_ortvalue_output("padded", made)
        self._graphs.pad.run_with_iobinding(binding)
        return made

    def move(self, block: OrtValue, rows: np.ndarray, at: int) -> None:
        """Copies the tokens at `rows` of a cache to `at` and after, in place."""
        binding = self._graphs.move.io_binding()
        binding.bind_ortvalue_input("cache", block)
        binding.bind_cpu_input("rows", rows.astype(np.int64))
        binding.bind_cpu_input("at", np.array([at], np.int64))
        binding.bind_ortvalue_output("moved", block)
        self._graphs.move.run_with_iobinding(binding)

    def taken(self, block: OrtValue, length: int) -> np.ndarray:
        """Returns the first `length` tokens of a cache, on the host."""
        _, parts, _, size = block.shape()
        found = np.empty((1, parts, length, size), _element(block))
        binding = self._graphs.take.io_binding()
        binding.bind_ortvalue_input("cache", block)
        binding.bind_cpu_input("length", np.array([length], np.int64))
        bind_output(binding, "taken", found)
        self._graphs.take.run_with_iobinding(binding)
        return found


def _element(value: OrtValue) -> Any:
    return _ELEMENTS[value.data_type()]


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
