"""The KV cache as one numpy block, which OpenVINO reads in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edge_spec.core.config import ModelConfig

GROWTH_TOKENS = 512
STEP_TOKENS = 64


def room(needed: int, limit: int) -> int:
    """Returns the slots for `needed` tokens. Passes read what is not in use, too, so there is an
    eighth more at most."""
    step = min(_rounded(needed // 8, STEP_TOKENS), GROWTH_TOKENS)
    return _rounded(min(_rounded(needed, step), limit), STEP_TOKENS)


class KvCache:
    """Keys and values of all layers, [layers, 2, 1, kv_heads, capacity, head_dim] float32.

    What is not in use is finite: it is weighed with zero, not left out.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.capacity = 0
        self.generation = 0  # changes when the buffers move: what is bound to them is stale
        self._block = np.zeros(self.shape(0), np.float32)

    def reserve(self, needed: int, used: int) -> None:
        """Makes room for `needed` tokens, keeping the first `used`; the buffers may move."""
        if needed <= self.capacity:
            return
        capacity = room(needed, self._config.context_length)
        grown = np.zeros(self.shape(capacity), np.float32)  # first: where memory is short, the old
        grown[..., :used, :] = self._block[..., :used, :]  # one stays
        self._block, self.capacity = grown, capacity
        self.generation += 1

    def write(self, start: int, rows: np.ndarray, passed: Sequence[tuple[np.ndarray, ...]]) -> None:
        """Writes these rows of a pass to start, start + 1, ...; passed: keys and values of each
        layer, [1, kv_heads, rows of the pass, head_dim]."""
        end = start + len(rows)
        for layer, parts in zip(self._block, passed, strict=True):
            for buffer, found in zip(layer, parts, strict=True):
                buffer[:, :, start:end] = found[:, :, rows]

    def first(self, length: int) -> np.ndarray:
        """Returns a view, [layers, 2, 1, kv_heads, length, head_dim]."""
        return self._block[..., :length, :]

    def buffers(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each with the name of its input."""
        for layer, parts in enumerate(self._block):
            for part, buffer in zip(("key", "value"), parts, strict=True):
                yield f"past.{layer}.{part}", buffer

    def clear(self) -> None:
        self.capacity = 0
        self._block = np.zeros(self.shape(0), np.float32)
        self.generation += 1

    def shape(self, length: int) -> tuple[int, ...]:
        config = self._config
        return (config.num_layers, 2, 1, config.num_kv_heads, length, config.head_dim)


def _rounded(tokens: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least `tokens`, and `step`."""
    return max(1, -(-tokens // step)) * step
