"""Keeps what the layers of the reference transformer need of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import require_state
from edge_spec.core.tree import NOTHING, preceding
from edge_spec.runtimes.reference.arithmetic import Arithmetic, Heads, Positions

_GROWTH_TOKENS = 256


class Rows(NamedTuple):
    """Describes how the rows of a pass stand to each other."""

    depths: np.ndarray  # [rows] int, after the last cached token
    sees: np.ndarray  # [rows, rows] bool: which of them each attends to
    parents: np.ndarray  # [rows] int; -1: the last cached token


class ReferenceCache:
    """Keys and values of the layers that have their own, and what convolutions take in, of each
    token: so both are committed and rolled back in the same way."""

    def __init__(self, model: Arithmetic) -> None:
        config = model.config
        self.model = model
        self._places = {
            layer: place
            for layers in (*config.cache_blocks.values(), config.convolving)
            for place, layer in enumerate(layers)
        }
        self._names = {
            layer: name for name, layers in config.cache_blocks.items() for layer in layers
        }
        # The last axis but one counts tokens; it grows as needed.
        self._arrays = {}
        for name, layers in config.cache_blocks.items():
            heads = config.heads(layers[0])
            kv_shape = (len(layers), 2, heads.num_kv_heads, 0, heads.head_dim)
            self._arrays[name] = np.zeros(kv_shape, np.float32)
        if config.convolving:
            shape = (len(config.convolving), 0, config.hidden_size)
            self._arrays["gated"] = np.zeros(shape, np.float32)

    def keys_and_values(self, layer: int) -> np.ndarray:
        """[2, kv_heads, tokens, head_dim]"""
        found: np.ndarray = self._arrays[self._names[layer]][self._places[layer]]
        return found

    def gated(self, layer: int) -> np.ndarray:
        """[tokens, hidden]"""
        found: np.ndarray = self._arrays["gated"][self._places[layer]]
        return found

    def after(self, length: int, new: Rows) -> RowsInContext:
        """Returns what the layers of a pass over rows after `length` tokens have of the text."""
        past = np.ones((len(new.depths), length), bool)
        rows = length + new.depths
        return RowsInContext(
            self,
            slice(length, length + len(rows)),
            np.concatenate([past, new.sees], axis=1),
            Positions(rows, np.concatenate([np.arange(length), rows])),
            preceding(new.parents, length, self.model.config.num_preceding),
        )

    def keep(self, rows: Sequence[int], length: int) -> None:
        """Moves these of the rows after `length` tokens together."""
        for array in self._arrays.values():
            kept = array[..., length + np.asarray(rows), :]
            array[..., length : length + len(rows), :] = kept

    def reserve(self, num_tokens: int) -> None:
        for name, array in self._arrays.items():
            missing = num_tokens - array.shape[-2]
            if missing > 0:
                room = [(0, 0)] * array.ndim
                room[-2] = (0, max(missing, _GROWTH_TOKENS))
                self._arrays[name] = np.pad(array, room)

    def state(self, length: int) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, kv_heads, length, head_dim] float32 and more such blocks for layers of
        other sizes (`ModelConfig.cache_blocks`), and where there are convolutions, "gated"
        [convolving layers, length, hidden]."""
        return {name: array[..., :length, :].copy() for name, array in self._arrays.items()}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError, and changes nothing then."""
        expected = {
            name: ((*array.shape[:-2], length, array.shape[-1]), np.float32)
            for name, array in self._arrays.items()
        }
        require_state(state, expected, length, self.model.config.context_length)
        self._arrays = {name: state[name].copy() for name in self._arrays}

    def clear(self) -> None:
        self._arrays = {name: array[..., :0, :] for name, array in self._arrays.items()}


@dataclass(frozen=True, eq=False)
class RowsInContext:
    """See `edge_spec.runtimes.reference.arithmetic.Context`."""

    cache: ReferenceCache
    new: slice  # of the cached tokens
    mask: np.ndarray  # [rows, cached] bool
    positions: Positions
    before: np.ndarray  # [count, rows] int64, as `preceding` has them

    def attend(self, layer: int, heads: Heads) -> np.ndarray:
        kept = self.cache.keys_and_values(layer)
        kept[:, :, self.new] = np.stack([heads.keys, heads.values])
        return self._mixed(layer, heads.queries, kept)

    def attend_to_source(self, layer: int, queries: np.ndarray) -> np.ndarray:
        source = self.cache.model.config.kv_source(layer)
        return self._mixed(layer, queries, self.cache.keys_and_values(source))

    def _mixed(self, layer: int, queries: np.ndarray, kept: np.ndarray) -> np.ndarray:
        whole = Heads(queries, *kept[:, :, : self.new.stop])
        return self.cache.model.mix(layer, whole, self.mask, self.positions)

    def precede(self, layer: int, gated: np.ndarray) -> np.ndarray:
        kept = self.cache.gated(layer)
        kept[self.new] = gated
        found: np.ndarray = np.where(self.before[..., None] > NOTHING, kept[self.before], 0)
        return found
