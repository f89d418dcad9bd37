"""The KV cache as one block in a device's memory, which passes read and write in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import require_state
from edge_spec.runtimes.ort.device_memory import DeviceMemory
from edge_spec.runtimes.ort.device_place import capacity_for

_NOTHING = (0, 0, 0, 0)


class DeviceCache:
    """Keys and values of all layers, [1, layers * 2 * kv_heads, capacity, head_dim]."""

    def __init__(self, config: ModelConfig, element: np.dtype[Any], memory: DeviceMemory) -> None:
        self._config = config
        self._element = element
        self._memory = memory
        self.capacity = 0
        self.generation = 0  # changes when the block moves: what is bound to it is stale
        self._block: OrtValue | None = None

    def reserve(self, needed: int) -> None:
        """Makes room for `needed` tokens; the block may move, and is then copied on the device."""
        if needed <= self.capacity:
            return
        room = capacity_for(needed, self.capacity, self._config.context_length)
        held = self._zeros(1) if self._block is None else self._block
        self._hold(held, room)

    def clear(self) -> None:
        self._block, self.capacity = None, 0
        self.generation += 1

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        """Binds the keys and the values of each layer as both past and present."""
        assert self._block is not None
        config, address = self._config, self._memory.address
        shape = (1, config.num_kv_heads, self.capacity, config.head_dim)
        step = prod(shape) * self._element.itemsize
        pointer = self._block.data_ptr()
        for layer in range(config.num_layers):
            for part in ("key", "value"):
                buffer = (*address, self._element.type, shape, pointer)
                binding.bind_input(f"past.{layer}.{part}", *buffer)
                binding.bind_output(f"present.{layer}.{part}", *buffer)
                pointer += step
        self._memory.count_cache(step * 2 * config.num_layers)

    def compact(self, start: int, rows: Sequence[int]) -> None:
        """Moves the tokens at start + rows to start, start + 1, ...; rows ascend."""
        kept = np.asarray(rows)
        moved = np.flatnonzero(kept != np.arange(len(kept)))
        if len(moved):
            assert self._block is not None
            first = int(moved[0])
            self._memory.move(self._block, start + kept[first:], start + first)

    def state(self, length: int) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, 1, kv_heads, length, head_dim] of the cache's type, as cache.py has it;
        read once."""
        block = self._zeros(0) if self._block is None else self._memory.taken(self._block, length)
        return {"kv": block.reshape(self._shape(length))}

    def require(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError for what is no state of `length` tokens."""
        expected = {"kv": (self._shape(length), self._element)}
        require_state(state, expected, length, self._config.context_length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Writes a state once that `require` has accepted."""
        room = capacity_for(length, self.capacity, self._config.context_length)
        held = state["kv"].reshape(self._zeros(length).shape) if length else self._zeros(1)
        self._hold(np.ascontiguousarray(held), room)

    def _hold(self, tokens: np.ndarray | OrtValue, room: int) -> None:
        """Takes a new block of these tokens and room after them."""
        count = tokens.shape[2] if isinstance(tokens, np.ndarray) else self.capacity
        # First: where memory is short, the old one stays.
        grown = self._memory.padded(tokens, _NOTHING, (0, 0, room - count, 0))
        self._block, self.capacity = grown, room
        self.generation += 1

    def _zeros(self, length: int) -> np.ndarray:
        config = self._config
        parts = config.num_layers * 2 * config.num_kv_heads
        return np.zeros((1, parts, length, config.head_dim), self._element)

    def _shape(self, length: int) -> tuple[int, ...]:
        config = self._config
        return (config.num_layers, 2, 1, config.num_kv_heads, length, config.head_dim)
