"""KV caches that onnxruntime reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from onnxruntime import IOBinding, OrtValue

from edge_spec.core.config import ModelConfig
from edge_spec.runtimes.kv_cache import KvCache, part_names
from edge_spec.runtimes.ort.cuda import CUDA_PROVIDER
from edge_spec.runtimes.ort.devices import OrtDevice
from edge_spec.runtimes.ort.signature import translated

_FIRST_TOKENS = 512  # of a device's cache, which doubles


class Place(NamedTuple):
    """A memory, as OrtValue and IOBinding name it, and its number among several such."""

    device: str
    number: int


def place_of(device: OrtDevice) -> Place | None:
    """Return a device's own memory; None: main memory."""
    return Place("cuda", device.number) if device.provider == CUDA_PROVIDER else None


class HostCache(KvCache):
    """A cache in main memory."""

    def bind(self, binding: IOBinding, suffix: str = "") -> None:
        """Bind each buffer as past and present. suffix: of the names."""
        for name, buffer in self.buffers():
            shared = OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(f"past.{name}{suffix}", shared)
            binding.bind_ortvalue_output(f"present.{name}{suffix}", shared)


class DeviceCache(KvCache):
    """A device's cache, for chains only, which grows through main memory. Moving it raises
    SessionError, DeviceMemoryError."""

    def __init__(self, config: ModelConfig, element: np.dtype[Any], place: Place) -> None:
        self._place = place
        self._held: dict[str, OrtValue] = {}
        # One token more than the context (session.MIN_ATTENDED).
        super().__init__(config, element=element, spare_tokens=1)

    def bind(self, binding: IOBinding) -> None:
        """Bind each layer's keys and values as past and present."""
        for kind, layers in self._layers.items():
            shape = self._shape(kind, self.capacity)[2:]
            pointer = self._held[kind].data_ptr()
            for layer in layers:
                for part in part_names(kind):
                    buffer = (*self._place, self._element.type, shape, pointer)
                    binding.bind_input(f"past.{layer}.{part}", *buffer)
                    binding.bind_output(f"present.{layer}.{part}", *buffer)
                    pointer += prod(shape) * self._element.itemsize

    def _room(self, needed: int) -> int:
        room = max(_FIRST_TOKENS, self.capacity)
        while room < needed:
            room *= 2
        return min(room, self._most)

    def _taken(self, length: int) -> dict[str, np.ndarray]:
        with translated(0, length):
            blocks = {kind: each.numpy() for kind, each in self._held.items()}
        return {
            kind: block[..., :length, :] for kind, block in (blocks or self._allocate(0)).items()
        }

    def _fill(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self._replace(max(self.capacity, self._room(length)), state, length)

    def _hold(self, blocks: dict[str, np.ndarray], capacity: int) -> None:
        with translated(0, capacity):
            self._held = {
                kind: OrtValue.ortvalue_from_numpy(block, *self._place)
                for kind, block in blocks.items()
                if capacity
            }
        self.capacity = capacity
        self.generation += 1
