"""Residual streams that enter a model's layers, copied while llama.cpp computes a pass.

Its scheduler tells a callback of each tensor (`cb_eval` of llama_context_params), whose names are
those of its graphs: the stream that leaves layer i is "l_out-i" in nearly all architectures of
llama-cpp-python 0.3.36. One that a graph calls otherwise never comes, and is refused when it is
first asked for (features.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from edge_spec.core.callbacks import library_callback
from edge_spec.runtimes.llamacpp.rows import library as rows_library

Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_OUTPUT = "l_out-"
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
        ("row_bytes", _INT),
        ("most_rows", _INT),
        ("layers", ctypes.POINTER(ctypes.c_int32)),
        ("rows", _HANDLE),
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
            row_bytes=4 * hidden_size,
            most_rows=most_rows,
            name=ctypes.cast(ggml.ggml_get_name, _NAME),
            bytes=ctypes.cast(ggml.ggml_nbytes, _BYTES),
            get=ctypes.cast(ggml.ggml_backend_tensor_get, _GET),
        )
        self.want(())
        self.callback: Any = _native() or _in_python
        self.data = ctypes.addressof(self._fields)

    def want(self, layers: Sequence[int]) -> None:
        """Has the next passes keep the streams that enter these layers; none: they cost nothing."""
        self._layers = np.array(layers, np.int32)
        self._rows = np.empty((len(layers), self._most_rows, self._hidden_size), np.float32)
        self._counts = np.zeros(len(layers), np.int64)
        self._fields.num_streams = len(layers)
        self._fields.layers = _pointer(self._layers, ctypes.c_int32)
        self._fields.rows = self._rows.ctypes.data
        self._fields.counts = _pointer(self._counts, _INT)

    def begin(self) -> None:
        """Forgets what the pass before has left."""
        self._counts[:] = 0

    def missing(self, num_rows: int) -> list[int]:
        """Returns the layers of whose streams the last pass, of so many rows, gave another number
        of values."""
        found: list[int] = self._layers[self._counts != num_rows].tolist()
        return found

    def rows(self, num_rows: int) -> np.ndarray:
        """[rows, layers, hidden_size] float32 of the last pass, valid until the next one."""
        return self._rows[:, :num_rows].transpose(1, 0, 2)


def _pointer(array: np.ndarray, kind: type[Any]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


@cache
def _native() -> Any:
    """The callback that needs no interpreter; None where the installation has none."""
    try:
        return ctypes.cast(rows_library.function("tap"), Callback)
    except (OSError, AttributeError):
        return None


@Callback
@library_callback
def _in_python(tensor: int, is_asked: bool, data: int) -> bool:
    """Does what edge_spec_rows_tap does, which says more."""
    tap = _Fields.from_address(data)
    if not tap.num_streams:
        return not is_asked
    name = tap.name(tensor).decode("utf-8", "replace")
    layer = _layer_of(name)
    stream = next((at for at in range(tap.num_streams) if tap.layers[at] == layer), None)
    if is_asked or stream is None:
        return stream is not None or not is_asked
    size = tap.bytes(tensor)
    rows = size // tap.row_bytes
    at = tap.counts[stream] - (rows if name in _SCALED else 0)
    fits = at >= 0 and at + rows <= tap.most_rows and rows * tap.row_bytes == size
    if fits:
        to = tap.rows + (stream * tap.most_rows + at) * tap.row_bytes
        tap.get(tensor, to, 0, size)
    tap.counts[stream] = at + rows if fits else -tap.most_rows
    return True


def _layer_of(name: str) -> int | None:
    """Returns the layer that a tensor of this name enters."""
    if name in _EMBEDDED or name in _SCALED:
        return 0
    number = name.removeprefix(_OUTPUT)
    return int(number) + 1 if number != name and number.isdecimal() else None
