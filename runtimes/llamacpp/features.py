"""Copies residual streams that enter layers, and keys and values, out of llama.cpp's passes.

The scheduler's callback (`cb_eval`) sees tensors by name: in nearly all architectures "l_out-i"
leaves layer i (rows/taps.cpp). Others are refused at first use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import OnPrefilled
from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.runtimes.llamacpp.library import NAME, PREFILL_TOKENS, ContextChoices
from edge_spec.runtimes.llamacpp.rows import library as rows_library
from edge_spec.runtimes.llamacpp.weights import GgufWeights

Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_STREAM, _KEYS, _VALUES = range(3)
_INT, _HANDLE, _SIZE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
# ggml's; too short to release the GIL for.
_NAME = ctypes.PYFUNCTYPE(ctypes.c_char_p, _HANDLE)
_BYTES = ctypes.PYFUNCTYPE(_SIZE, _HANDLE)
_GET = ctypes.PYFUNCTYPE(None, _HANDLE, _HANDLE, _SIZE, _SIZE)


class _Fields(ctypes.Structure):
    """Layout of rows/taps.cpp."""

    _fields_ = (
        ("num_streams", _INT),
        ("most_rows", _INT),
        ("layers", ctypes.POINTER(ctypes.c_int32)),
        ("kinds", ctypes.POINTER(ctypes.c_int32)),
        ("row_bytes", ctypes.POINTER(_INT)),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
        ("counts", ctypes.POINTER(_INT)),
        ("name", _NAME),
        ("bytes", _BYTES),
        ("get", _GET),
    )


class Tapped(NamedTuple):
    """What a tap keeps of a layer: its input stream, keys or values, `size` numbers per token."""

    layer: int
    kind: int
    size: int


class Tap:
    """Copies tensors of passes in contexts opened with it, one pass at a time. `callback` and
    `data` are for llama_context_params."""

    def __init__(self, ggml: Any, most_rows: int) -> None:
        """Raises OSError or AttributeError if the kernels were not built."""
        self._most_rows = most_rows
        self._fields = _Fields(
            most_rows=most_rows,
            name=ctypes.cast(ggml.ggml_get_name, _NAME),
            bytes=ctypes.cast(ggml.ggml_nbytes, _BYTES),
            get=ctypes.cast(ggml.ggml_backend_tensor_get, _GET),
        )
        self._wanted: tuple[Tapped, ...] = ()
        self._lay_out()
        self.callback: Any = ctypes.cast(rows_library.function("tap"), Callback)
        self.data = ctypes.addressof(self._fields)

    def want(self, wanted: Sequence[Tapped]) -> None:
        if self._wanted != tuple(wanted):
            self._wanted = tuple(wanted)
            self._lay_out()
        self._counts[:] = [0] * len(self._counts)

    def rows(self, wanted: Tapped, num_rows: int) -> np.ndarray | None:
        """Return [rows, numbers] float32 of the last pass, valid until the next; None if it had
        another number of rows."""
        at = self._wanted.index(wanted)
        return self._rows[at][:num_rows] if self._counts[at] == num_rows else None

    def _lay_out(self) -> None:
        count, fields = len(self._wanted), self._fields
        self._rows = [np.empty((self._most_rows, each.size), np.float32) for each in self._wanted]
        self._counts = (_INT * count)()
        fields.num_streams, fields.counts = count, self._counts
        fields.layers = (ctypes.c_int32 * count)(*(each.layer for each in self._wanted))
        fields.kinds = (ctypes.c_int32 * count)(*(each.kind for each in self._wanted))
        fields.row_bytes = (_INT * count)(*(rows.strides[0] for rows in self._rows))
        fields.rows = (_INT * count)(*(rows.ctypes.data for rows in self._rows))


class Features:
    """The features that a session collects. Raises UnsupportedModelError if the library returns no
    final states of this model."""

    def __init__(
        self, weights: GgufWeights, layers: Sequence[int], on_prefilled: OnPrefilled
    ) -> None:
        self.on_prefilled = on_prefilled
        last, size = weights.config.num_layers, weights.hidden_size
        self.has_final = last in layers
        self.streams = [Tapped(layer, _STREAM, size) for layer in layers if layer < last]
        self._weights = weights
        if self.has_final and not weights.gives_final_states:
            raise unsupported("final states of this model")

    def fitted(self, choices: ContextChoices) -> ContextChoices:
        """Return context options that give the features. Prefill keeps its pass width: a narrower
        one could change last bits in the cache."""
        num_outputs, tap = choices.num_outputs, choices.tap
        if self.has_final:
            num_outputs = PREFILL_TOKENS
        if self.streams:
            tap = tap or new_tap(self._weights, PREFILL_TOKENS)
        return replace(choices, num_outputs=num_outputs, tap=tap)

    def read(
        self, tap: Tap | None, num_rows: int, hidden: np.ndarray | None, rows: slice | np.ndarray
    ) -> np.ndarray:
        """Copy rows of the last pass, of `num_rows`: [rows, features, hidden_size] float32. hidden:
        its final states. Raises SessionError."""
        found = []
        for stream in self.streams:
            kept = None if tap is None else tap.rows(stream, num_rows)
            if kept is None:
                raise _missing("inputs of layers")
            found.append(kept[rows])
        if self.has_final:
            if hidden is None:
                raise _missing("hidden states")
            found.append(hidden[rows])
        return np.stack(found, axis=1)


def new_tap(weights: GgufWeights, most_rows: int) -> Tap:
    try:
        return Tap(weights.library.ggml, most_rows)
    except (OSError, AttributeError):
        what = "inputs of layers without edge-spec's own kernels"
        raise unsupported(what) from None


def unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{NAME} does not give the {what}, which the drafter reads",
        remedy="Use --runtime ort, or another drafter.",
    )


def _missing(what: str) -> SessionError:
    return SessionError(f"the library returned no {what}", remedy="Update the library.")


ARCHITECTURES = ("gemma4",)  # with names that rows/taps.cpp expects
_GROWTH = 256  # tokens to make room for at once


class KeysValues:
    """A session's keys and values of some layers."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        """Raises UnsupportedModelError if the library does not give them for this model."""
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
        self.length = 0  # tokens kept, from the first
        self.wanted = [
            Tapped(layer, kind, heads.kv_size)
            for layer, heads in self._heads.items()
            for kind in (_KEYS, _VALUES)
        ]
        self._last: list[np.ndarray] | None = None  # last pass, ordered as `wanted`

    def take(self, tap: Tap | None, rows: int) -> None:
        """Take the last pass's keys and values, before its rows are committed."""
        found = [None if tap is None else tap.rows(each, rows) for each in self.wanted]
        known = [each for each in found if each is not None]
        self._last = known if len(known) == len(found) else None

    def commit(self, rows: Sequence[int], length: int) -> None:
        """Keep these rows of the last pass after `length` tokens."""
        if self._last is None or self.length < length:
            return  # earlier tokens are missing
        end, taken = length + len(rows), np.asarray(rows)
        for each, found in zip(self.wanted, self._last, strict=True):
            self._make_room(each.layer, end)
            part = self._kept[each.layer][each.kind - _KEYS]
            own = found[taken].reshape(len(taken), *part.shape[::2])
            part[:, length:end] = own.swapaxes(0, 1)
        self.length = end

    def cut(self, length: int) -> None:
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
