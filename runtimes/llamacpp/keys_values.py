"""Keys and values of some layers, kept for a network that attends to them (`core.features`).

The library's cache is its own: what a pass adds to it is copied while it is computed (taps.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.errors import UnsupportedModelError
from edge_spec.runtimes.llamacpp.taps import Tap

ARCHITECTURES = ("gemma4",)  # whose graphs name their keys and values as taps.py looks for
_GROWTH = 256  # tokens that are made room for at once


class KeysValues:
    """Follows a session. config: of its model."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        """Raises UnsupportedModelError where the library gives none of this model."""
        if config.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"llama.cpp does not give the keys and values of the architecture "
                f"{config.architecture!r}, which the drafter reads",
                remedy="Use --runtime ort, or another drafter.",
            )
        self._heads = {layer: config.heads(layer) for layer in layers}
        self._kept = {
            layer: np.empty((2, heads.num_kv_heads, 0, heads.head_dim), np.float32)
            for layer, heads in self._heads.items()
        }
        self.length = 0  # tokens whose are kept, from the first on
        self._last: dict[int, tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def sizes(self) -> dict[int, int]:
        """Counts the numbers of a token's keys in each layer; it has as many values."""
        return {layer: heads.kv_size for layer, heads in self._heads.items()}

    def take(self, tap: Tap | None, rows: int) -> None:
        """Takes those of the last pass, none of whose rows is committed yet."""
        self._last = None if tap is None else tap.keys_values(rows)

    def commit(self, rows: Sequence[int], length: int) -> None:
        """Keeps these rows of the last pass after the first `length` tokens."""
        if self._last is None or self.length < length:
            return  # nothing is known of those before
        end, taken = length + len(rows), np.asarray(rows)
        for layer, both in self._last.items():
            self._make_room(layer, end)
            for part, found in zip(self._kept[layer], both, strict=True):
                own = found[taken].reshape(len(taken), *part.shape[::2])
                part[:, length:end] = own.swapaxes(0, 1)
        self.length = end

    def cut(self, length: int) -> None:
        """Forgets the tokens from this one on."""
        self.length = min(self.length, length)

    def of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self._kept[layer][:, :, : self.length]
        return keys, values

    def _make_room(self, layer: int, tokens: int) -> None:
        kept = self._kept[layer]
        missing = tokens - kept.shape[2]
        if missing > 0:
            room = max(missing, _GROWTH)
            self._kept[layer] = np.pad(kept, [(0, 0), (0, 0), (0, room), (0, 0)])
