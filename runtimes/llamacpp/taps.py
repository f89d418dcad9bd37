"""Residual streams that enter a model's layers, and keys and values of some, copied while llama.cpp
computes a pass.

Its scheduler tells a callback of each tensor (`cb_eval` of llama_context_params), whose names are
those of its graphs: the stream that leaves layer i is "l_out-i" in nearly all architectures of
llama-cpp-python 0.3.36. One that a graph calls otherwise never comes, and is refused when it is
first asked for (features.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from edge_spec.core.callbacks import library_callback
from edge_spec.runtimes.llamacpp.rows import library as rows_library

Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_OUTPUT = "l_out-"
_OF_OTHERS = ("Kcur_pos-", "Vcur_normed-")  # keys and values
_STREAM, _KEYS, _VALUES = range(3)
# What graphs call the stream that enters layer 0, and what some make of it before.
_EMBEDDED = ("embd", "inp_embd", "model.embed_tokens", "model.input_embed")
_SCALED = ("inp_scaled", "inp_embd_scaled")
_INT, _HANDLE, _SIZE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
# Of ggml. They take no time in which another thread could run.
_NAME = ctypes.PYFUNCTYPE(ctypes.c_char_p, _HANDLE)
_BYTES = ctypes.PYFUNCTYPE(_SIZE, _HANDLE)
_GET = ctypes.PYFUNCTYPE(None, _HANDLE, _HANDLE, _SIZE, _SIZE)


class _Fields(ctypes.Structure):
    """As rows/taps.cpp lays it out."""

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


class Tap:
    """Belongs to the contexts that were opened with it, of which one computes at a time.

    Attributes: `callback` and `data` for llama_context_params.
    """

    def __init__(self, ggml: Any, hidden_size: int, most_rows: int) -> None:
        """ggml: the library as ctypes has loaded it. most_rows: of one pass."""
        self._hidden_size, self._most_rows = hidden_size, most_rows
        self._fields = _Fields(
            most_rows=most_rows,
            name=ctypes.cast(ggml.ggml_get_name, _NAME),
            bytes=ctypes.cast(ggml.ggml_nbytes, _BYTES),
            get=ctypes.cast(ggml.ggml_backend_tensor_get, _GET),
        )
        self._streams: tuple[int, ...] = ()
        self._shared: Mapping[int, int] = {}
        self._lay_out()
        self.callback: Any = _native() or _IN_PYTHON
        self.data = ctypes.addressof(self._fields)

    def want(self, layers: Sequence[int]) -> None:
        """Has the next passes keep the streams that enter these layers; none: they cost nothing."""
        if self._streams != tuple(layers):
            self._streams = tuple(layers)
            self._lay_out()

    def want_keys_values(self, sizes: Mapping[int, int]) -> None:
        """Has the next passes keep the keys and values of these layers, as many numbers each."""
        self._shared = dict(sizes)
        self._lay_out()

    def begin(self) -> None:
        """Forgets what the pass before has left."""
        self._counts[:] = 0

    def missing(self, num_rows: int) -> list[int]:
        """Returns the layers of whose streams the last pass, of so many rows, gave another number
        of values."""
        count = len(self._streams)
        found: list[int] = self._layers[:count][self._counts[:count] != num_rows].tolist()
        return found

    def copy_rows(
        self, layers: Sequence[int], rows: slice | Sequence[int], copies: np.ndarray
    ) -> None:
        """Copies these rows of the last pass. layers: some of those that were wanted. copies:
        [rows, layers, hidden_size] float32."""
        for at, layer in enumerate(layers):
            copies[:, at] = self._rows[self._streams.index(layer)][rows]

    def keys_values(self, num_rows: int) -> dict[int, tuple[np.ndarray, np.ndarray]] | None:
        """[rows, numbers] float32 keys and values of each layer of the last pass, valid until the
        next one; None where it was not of so many rows."""
        first = len(self._streams)
        if not (self._counts[first:] == num_rows).all():
            return None
        rows = [each[:num_rows] for each in self._rows[first:]]
        return dict(zip(self._shared, zip(rows[::2], rows[1::2], strict=True), strict=True))

    def _lay_out(self) -> None:
        shared = [(layer, kind) for layer in self._shared for kind in (_KEYS, _VALUES)]
        wanted = [*((layer, _STREAM) for layer in self._streams), *shared]
        sizes = [self._hidden_size] * len(self._streams)
        sizes += [self._shared[layer] for layer, _ in shared]
        self._layers = np.array([layer for layer, _ in wanted], np.int32)
        self._kinds = np.array([kind for _, kind in wanted], np.int32)
        self._row_bytes = 4 * np.array(sizes, np.int64)
        self._rows = [np.empty((self._most_rows, size), np.float32) for size in sizes]
        self._addresses = np.array([rows.ctypes.data for rows in self._rows], np.int64)
        self._counts = np.zeros(len(wanted), np.int64)
        fields = self._fields
        fields.num_streams = len(wanted)
        fields.layers = _pointer(self._layers, ctypes.c_int32)
        fields.kinds = _pointer(self._kinds, ctypes.c_int32)
        fields.row_bytes = _pointer(self._row_bytes, _INT)
        fields.rows = _pointer(self._addresses, ctypes.c_int64)
        fields.counts = _pointer(self._counts, _INT)


def _pointer(array: np.ndarray, kind: type[Any]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


@cache
def _native() -> Any:
    """The callback that needs no interpreter; None where the installation has none."""
    try:
        return ctypes.cast(rows_library.function("tap"), Callback)
    except (OSError, AttributeError):
        return None


@library_callback
def _in_python(tensor: int, is_asked: bool, data: int) -> bool:
    """Does what edge_spec_rows_tap does, which says more."""
    tap = _Fields.from_address(data)
    if not tap.num_streams:
        return not is_asked
    name = tap.name(tensor).decode("utf-8", "replace")
    found = _kind_and_layer(name)
    streams = range(tap.num_streams)
    stream = next((at for at in streams if (tap.kinds[at], tap.layers[at]) == found), None)
    if is_asked or stream is None:
        return stream is not None or not is_asked
    size = tap.bytes(tensor)
    row_bytes = tap.row_bytes[stream]
    rows = size // row_bytes
    at = tap.counts[stream] - (rows if name in _SCALED else 0)
    fits = at >= 0 and at + rows <= tap.most_rows and rows * row_bytes == size
    if fits:
        tap.get(tensor, tap.rows[stream] + at * row_bytes, 0, size)
    tap.counts[stream] = at + rows if fits else -tap.most_rows
    return True


_IN_PYTHON = Callback(_in_python)  # kept: the library calls it as long as the process lives


def _kind_and_layer(name: str) -> tuple[int, int] | None:
    """Returns what a tensor of this name is of which layer."""
    if name in _EMBEDDED or name in _SCALED:
        return _STREAM, 0
    for kind, beginning in enumerate((_OUTPUT, *_OF_OTHERS)):
        number = name.removeprefix(beginning)
        if number != name and number.isdecimal():
            return kind, int(number) + (kind == _STREAM)  # the next one, which a stream enters
    return None
