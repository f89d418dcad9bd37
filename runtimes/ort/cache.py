"""The KV cache as one numpy block that onnxruntime reads and writes in place.

A target and the sessions that are a part of it share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import require_state
from edge_spec.placement.memory import return_freed

GROWTH_TOKENS = 512
# A multiple of what vector kernels take at once: then each token is added up in the same lane
# however much room there is after the last one, and sums are the same bit for bit.
KERNEL_TOKENS = 64
_SPARE = 4  # times the room that a text needs, from which on most of it is given back
_FLOAT32: np.dtype[Any] = np.dtype(np.float32)


class KvCache:
    """Keys and values of all layers, [layers, 2, 1, kv_heads, capacity, head_dim].

    is_read_whole: passes read what is not in use, too (stacked.py), so that room costs time.
    element: their type.
    """

    def __init__(
        self,
        config: ModelConfig,
        is_read_whole: bool = False,
        element: np.dtype[Any] = _FLOAT32,
    ) -> None:
        self._config = config
        self._element = element
        self._is_read_whole = is_read_whole
        self.capacity = 0
        self.generation = 0  # changes when the buffers move: what is bound to them is stale
        self.last_writer: object | None = None
        self._block = self._allocate(0)

    def reserve(self, needed: int, used: int) -> None:
        """Makes room for `needed` tokens, keeping the first `used`; the buffers may move."""
        if needed <= self.capacity:
            return
        capacity = self._room(needed)
        grown = self._allocate(capacity)  # first: where memory is short, the old one stays
        grown[..., :used, :] = self._block[..., :used, :]
        self._block, self.capacity = grown, capacity
        self.generation += 1

    def clear(self) -> None:
        self.capacity = 0
        self._block = self._allocate(0)
        self.generation += 1
        return_freed()

    def shrink(self, used: int) -> None:
        """Gives back room that a much longer text has had; the buffers may move, and rows after the
        first `used` tokens are gone then."""
        room = self._room(used + GROWTH_TOKENS)
        if self.capacity >= _SPARE * room:
            kept = self._allocate(room)
            kept[..., :used, :] = self._block[..., :used, :]
            self._block, self.capacity = kept, room
            self.last_writer = None
            self.generation += 1
            return_freed()

    def bind(self, binding: onnxruntime.IOBinding, suffix: str = "") -> None:
        """Binds each buffer as both past and present. suffix: of the names."""
        for layer, parts in enumerate(self._block):
            for part, buffer in zip(("key", "value"), parts, strict=True):
                shared = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
                binding.bind_ortvalue_input(f"past.{layer}.{part}{suffix}", shared)
                binding.bind_ortvalue_output(f"present.{layer}.{part}{suffix}", shared)

    def compact(self, start: int, rows: Sequence[int]) -> None:
        """Moves the tokens at start + rows to start, start + 1, ..."""
        kept = self._block[..., start + np.asarray(rows), :]
        self._block[..., start : start + len(rows), :] = kept

    def state(self, length: int) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, 1, kv_heads, length, head_dim] of the cache's type, a copy of the first
        tokens."""
        return {"kv": self._block[..., :length, :].copy()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError, and changes nothing then."""
        expected = {"kv": (self._shape(length), self._element)}
        require_state(state, expected, length, self._config.context_length)
        self.reserve(length, 0)
        self._block[..., :length, :] = state["kv"]
        self.last_writer = None

    def _room(self, needed: int) -> int:
        # One more than the context, for the second row of a single one (passes.MIN_ATTENDED).
        most = self._config.context_length + 1
        if not self._is_read_whole:
            return min(_rounded(needed, GROWTH_TOKENS), most)
        step = _rounded(needed // 8, KERNEL_TOKENS)
        return _rounded(min(_rounded(needed, min(step, GROWTH_TOKENS)), most), KERNEL_TOKENS)

    def _allocate(self, capacity: int) -> np.ndarray:
        return np.zeros(self._shape(capacity), self._element)

    def _shape(self, length: int) -> tuple[int, ...]:
        config = self._config
        return (config.num_layers, 2, 1, config.num_kv_heads, length, config.head_dim)


def _rounded(tokens: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least `tokens`, and `step`."""
    return max(1, -(-tokens // step)) * step
