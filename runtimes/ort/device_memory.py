"""Keys and values in a device's own memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from onnx import parser
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import require_state
from edge_spec.runtimes.ort.devices import ProviderChoice
from edge_spec.runtimes.ort.signature import ELEMENT_NAMES, translated

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


def capacity_for(needed: int, capacity: int, most: int) -> int:
    """Returns for how many tokens a cache has room that had it for `capacity`: it doubles."""
    room = max(FIRST_TOKENS, capacity)
    while room < needed:
        room *= 2
    return min(room, most)


class DeviceCache:
    """Keys and values of all layers, [1, layers * 2 * kv_heads, capacity, head_dim].

    moving: the graph of `moving_graph`, on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        element: np.dtype[Any],
        place: Place,
        moving: onnxruntime.InferenceSession,
    ) -> None:
        self._config = config
        self._element = element
        self._address = place.device, place.number  # as OrtValue and IOBinding take it
        self._moving = moving
        self.is_copied = place.is_copied
        self.capacity = 0
        self.generation = 0  # changes when the block moves: what is bound to it is stale
        self.last_writer: object | None = None
        self._block: OrtValue | None = None

    def reserve(self, needed: int, used: int) -> None:
        """Makes room for `needed` tokens, keeping the first `used`; the block may move, by way of
        main memory. Raises SessionError, DeviceMemoryError."""
        if needed > self.capacity:
            with translated(needed - used, used):
                self._hold(self._taken(used), needed)

    def clear(self) -> None:
        self._block, self.capacity = None, 0
        self.generation += 1

    def bind(self, binding: onnxruntime.IOBinding, suffix: str = "") -> None:
        """Binds the keys and the values of each layer as both past and present. suffix: of the
        names."""
        assert self._block is not None
        config = self._config
        shape = (1, config.num_kv_heads, self.capacity, config.head_dim)
        step = prod(shape) * self._element.itemsize
        pointer = self._block.data_ptr()
        for layer in range(config.num_layers):
            for part in ("key", "value"):
                buffer = (*self._address, self._element.type, shape, pointer)
                binding.bind_input(f"past.{layer}.{part}{suffix}", *buffer)
                binding.bind_output(f"present.{layer}.{part}{suffix}", *buffer)
                pointer += step

    def compact(self, start: int, rows: Sequence[int]) -> None:
        """Moves the tokens at start + rows to start, start + 1, ..., on the device; rows ascend.
        Raises SessionError, DeviceMemoryError."""
        kept = np.asarray(rows, np.int64)
        first = int(np.flatnonzero(kept != np.arange(len(kept)))[0])
        with translated(len(rows), start):
            binding = self._moving.io_binding()
            binding.bind_ortvalue_input("cache", self._block)
            binding.bind_cpu_input("rows", start + kept[first:])
            binding.bind_cpu_input("at", np.array([start + first]))
            binding.bind_ortvalue_output("moved", self._block)
            self._moving.run_with_iobinding(binding)

    def state(self, length: int) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, 1, kv_heads, length, head_dim] of the cache's type, as kv_cache.py has
        it. Raises SessionError, DeviceMemoryError."""
        with translated(0, length):
            return {"kv": self._taken(length).reshape(self._shape(length)).copy()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError, SessionError, DeviceMemoryError, and changes nothing then."""
        expected = {"kv": (self._shape(length), self._element)}
        require_state(state, expected, length, self._config.context_length)
        with translated(0, length):
            self._hold(state["kv"].reshape(self._zeros(length).shape), length)
        self.last_writer = None

    def _hold(self, tokens: np.ndarray, needed: int) -> None:
        """Takes a new block of these tokens and zeros after them, as many as `needed` or more."""
        # One token more than the context, for the second row of a single one (passes.MIN_ATTENDED).
        room = capacity_for(needed, self.capacity, self._config.context_length + 1)
        grown = self._zeros(room)
        grown[:, :, : tokens.shape[2]] = tokens
        # First: where memory is short, the old one stays.
        self._block, self.capacity = OrtValue.ortvalue_from_numpy(grown, *self._address), room
        self.generation += 1

    def _taken(self, length: int) -> np.ndarray:
        """The first tokens, in main memory: where that is the block itself, they change with it."""
        if self._block is None:
            return self._zeros(length)
        taken: np.ndarray = self._block.numpy()[:, :, :length]
        return taken

    def _zeros(self, length: int) -> np.ndarray:
        config = self._config
        parts = config.num_layers * 2 * config.num_kv_heads
        return np.zeros((1, parts, length, config.head_dim), self._element)

    def _shape(self, length: int) -> tuple[int, ...]:
        config = self._config
        return (config.num_layers, 2, 1, config.num_kv_heads, length, config.head_dim)


def moving_graph(element: np.dtype[Any]) -> bytes:
    """Returns a serialized model: `cache` [1, parts, capacity, size] with the tokens at `rows` [k]
    int64 copied to `at` [1] int64 and after; in place where `moved` is bound to the same buffer."""
    cache = f"{ELEMENT_NAMES[element.name]}[1, parts, capacity, size]"
    model: Any = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 24]>
        moving ({cache} cache, int64[k] rows, int64[1] at) => ({cache} moved) {{
            kept = Gather <axis = 2> (cache, rows)
            moved = TensorScatter <axis = 2> (cache, kept, at)
        }}""")
    return bytes(model.SerializeToString())
