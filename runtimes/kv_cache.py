"""Keeps keys and values of a text in numpy blocks that libraries read and write in place.

A target and the sessions that are a part of it share one cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import require_state
from edge_spec.models.devices import return_freed

GROWTH_TOKENS = 512
MAX_ROWS, PREFILL_ROWS = 64, 256  # of a pass that is scored, and of one that reads a prompt
# A multiple of what vector kernels take at once: then each token is added up in the same lane
# however much room there is after the last one, and sums are the same bit for bit.
KERNEL_TOKENS = 64
_SPARE = 4  # times the room that a text needs, from which on most of it is given back
_GATED = "gated"  # a kind of blocks, by its name in a state
_KEY_AND_VALUE = ("key", "value")  # what ends the names of other blocks' buffers
_FLOAT32: np.dtype[Any] = np.dtype(np.float32)


class KvCache:
    """Keys and values of the layers that have some, [layers, 2, 1, kv_heads, capacity, head_dim] in
    a block for each shape, and what convolutions take in, [layers, 1, 1, 1, capacity + 1, hidden],
    whose last row stays zero (exporters/onnx/attention.py).

    is_read_whole: passes read what is not in use, too, so that room costs time. spare_tokens: how
    many may be beyond the context.
    """

    def __init__(
        self,
        config: ModelConfig,
        is_read_whole: bool = False,
        element: np.dtype[Any] = _FLOAT32,
        spare_tokens: int = 0,
    ) -> None:
        self._config = config
        self._element = element
        self._layers = config.cache_blocks  # of each kind of block
        if config.convolving:
            self._layers[_GATED] = config.convolving
        self._is_read_whole = is_read_whole
        self._most = config.context_length + spare_tokens
        self.capacity = 0
        self.generation = 0  # changes when the buffers move: what is bound to them is stale
        self.last_writer: object | None = None
        self._blocks: dict[str, np.ndarray] = {}
        self._hold(self._allocate(0), 0)

    def reserve(self, needed: int, used: int) -> None:
        """Makes room for `needed` tokens, keeping the first `used`; the buffers may move."""
        if needed > self.capacity:
            self._replace(self._room(needed), self._taken(used), used)

    def clear(self) -> None:
        self._hold(self._allocate(0), 0)
        return_freed()

    def shrink(self, used: int) -> None:
        """Give back room that a much longer text has had; the buffers may move, and hold the first
        `used` tokens alone then."""
        room = self._room(used + GROWTH_TOKENS)
        if self.capacity >= _SPARE * room:
            self._replace(room, self._taken(used), used)
            self.last_writer = None
            return_freed()

    def buffers(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each with its name, such as "0.key", which ends those of a graph's values."""
        for kind, layers in self._layers.items():
            for layer, parts in zip(layers, self._blocks[kind], strict=True):
                for part, buffer in zip(part_names(kind), parts, strict=True):
                    yield f"{layer}.{part}", buffer

    def of_layer(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the buffers of keys and of values of a layer, [kv_heads, capacity, head_dim]."""
        kind = next(kind for kind, layers in self._config.cache_blocks.items() if layer in layers)
        keys, values = self._blocks[kind][self._layers[kind].index(layer)]
        return keys[0], values[0]

    def gated(self, layer: int) -> np.ndarray:
        """Returns the buffer of a convolving layer, [capacity + 1, hidden]."""
        buffer: np.ndarray = self._blocks[_GATED][self._layers[_GATED].index(layer)][0, 0, 0]
        return buffer

    def compact(self, start: int, rows: Sequence[int]) -> None:
        """Moves the tokens at start + rows to start, start + 1, ..."""
        for block in self._blocks.values():
            kept = block[..., start + np.asarray(rows), :]
            block[..., start : start + len(rows), :] = kept

    def state(self, length: int) -> dict[str, np.ndarray]:
        """Copy the first tokens: "kv" [layers, 2, 1, kv_heads, length, head_dim], more such blocks
        for layers of other sizes (`ModelConfig.cache_blocks`), and where there are convolutions
        "gated" [convolving layers, 1, 1, 1, length, hidden]."""
        return {kind: tokens.copy() for kind, tokens in self._taken(length).items()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError, and changes nothing then."""
        expected = {kind: (self._shape(kind, length), self._element) for kind in self._layers}
        require_state(state, expected, length, self._config.context_length)
        self._fill(state, length)
        self.last_writer = None

    def _fill(self, state: Mapping[str, np.ndarray], length: int) -> None:
        self.reserve(length, 0)
        for kind, block in self._blocks.items():
            block[..., :length, :] = state[kind]

    def _room(self, needed: int) -> int:
        if self._is_read_whole:
            return room_read_whole(needed, self._most)
        return min(_rounded(needed, GROWTH_TOKENS), self._most)

    def _taken(self, length: int) -> dict[str, np.ndarray]:
        """Return the first tokens of each block, which change with it."""
        return {kind: block[..., :length, :] for kind, block in self._blocks.items()}

    def _replace(self, capacity: int, tokens: Mapping[str, np.ndarray], length: int) -> None:
        """Take new blocks that begin with these tokens, once there is memory for them."""
        made = self._allocate(capacity)
        for kind, block in made.items():
            block[..., :length, :] = tokens[kind]
        self._hold(made, capacity)

    def _hold(self, blocks: dict[str, np.ndarray], capacity: int) -> None:
        self._blocks, self.capacity = blocks, capacity
        self.generation += 1

    def _allocate(self, capacity: int) -> dict[str, np.ndarray]:
        return {
            kind: np.zeros(self._shape(kind, capacity + (kind == _GATED)), self._element)
            for kind in self._layers
        }

    def _shape(self, kind: str, rows: int) -> tuple[int, ...]:
        config, layers = self._config, self._layers[kind]
        if kind == _GATED:
            return (len(layers), 1, 1, 1, rows, config.hidden_size)
        _, num_kv_heads, head_dim = config.heads(layers[0])
        return (len(layers), 2, 1, num_kv_heads, rows, head_dim)


def room_read_whole(needed: int, limit: int) -> int:
    """Returns for how many tokens there is room where passes read all of it: whole kernels, and an
    eighth more than `needed` at most."""
    step = min(_rounded(needed // 8, KERNEL_TOKENS), GROWTH_TOKENS)
    return _rounded(min(_rounded(needed, step), limit), KERNEL_TOKENS)


def part_names(kind: str) -> tuple[str, ...]:
    """Returns what ends the names of the buffers of each layer in such a block."""
    return (_GATED,) if kind == _GATED else _KEY_AND_VALUE


def _rounded(tokens: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least `tokens`, and `step`."""
    return max(1, -(-tokens // step)) * step
