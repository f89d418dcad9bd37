"""Python bindings of the kernels for few rows."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from edge_spec.runtimes.llamacpp.rows import build
from edge_spec.storage.atomic import sha256_file

# ggml's numbers of weight types with kernels, in the order of rows::Type.
TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "F16": 1,
    "BF16": 30,
    "F32": 0,
}
_NUM_TYPES = 64  # ggml types that are counted
_PATHS_BYTES = 16_384

_log = logging.getLogger(__name__)


class Load(ctypes.Structure):
    """What one load of a model gave to the kernels."""

    _fields_ = (
        ("wants_stock", ctypes.c_int32),
        ("num_packed", ctypes.c_int32),
        ("num_failed", ctypes.c_int32),  # out of memory
        ("packed_bytes", ctypes.c_int64),
        ("left_by_number", ctypes.c_int32 * _NUM_TYPES),  # matrices left to ggml, by type
        ("num_trimmed", ctypes.c_int32),
    )
    num_scored = 0  # rows of a trimmed output matrix

    @property
    def left(self) -> dict[str, int]:
        """Count the matrices left to ggml by type name."""
        names = {number: name for name, number in TYPES.items()}
        left = enumerate(self.left_by_number)
        return {names.get(i, f"type {i}"): count for i, count in left if count}

    @property
    def is_whole(self) -> bool:
        return self.num_packed > 0 and not self.num_failed and not self.left


_HANDLE, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_FUNCTIONS: tuple[tuple[str, list[Any], Any], ...] = (
    ("best_table", [], _TEXT),
    ("table_name", [_INT], _TEXT),
    ("table_is_supported", [_INT], _INT),
    ("install", [_HANDLE, ctypes.c_uint32, _INT], _TEXT),
    ("takes", [], _INT),
    ("buffer_type", [], _HANDLE),
    ("libraries", [_HANDLE, _TEXT, ctypes.c_size_t], _INT),
    ("begin_load", [_INT, _TEXT, ctypes.c_int64], None),
    ("end_load", [ctypes.POINTER(Load)], None),
    ("log", [_INT, _TEXT, _HANDLE], None),
    ("log_from", [_INT], None),
    ("tap", [_HANDLE, ctypes.c_bool, _HANDLE], ctypes.c_bool),
)


def path() -> Path:
    """Return where a built library is."""
    return Path(__file__).with_name(build.library_name())


@cache
def library() -> Any:
    """Raises OSError if the library is missing, outdated or does not load, AttributeError if it
    lacks a function."""
    _require_current()
    loaded = ctypes.CDLL(str(path()))
    for name, arguments, result in _FUNCTIONS:
        function = getattr(loaded, f"edge_spec_rows_{name}")  # indexing would make another object
        function.argtypes, function.restype = arguments, result
    return loaded


def _require_current() -> None:
    """Rebuild a checkout's library if its sources have changed. Raises OSError if that fails."""
    if not path().is_file() or build.is_current(path()):
        return
    _log.warning("Compiling the kernels for few rows, whose sources have changed.")
    try:
        build.build(path())
    except (OSError, subprocess.CalledProcessError) as fault:
        command = f"{sys.executable} {build.__file__}"
        raise OSError(f"its sources have changed and do not compile: run {command}") from fault


def function(name: str) -> Any:
    """Raises as `library` does."""
    return getattr(library(), f"edge_spec_rows_{name}")


def table() -> str:
    """Return the kernels in force: the fastest for this processor, or the environment's. Raises as
    `library` does."""
    name: bytes = function("best_table")()
    return name.decode()


def tables() -> list[str]:
    """Return the kernels that this processor runs, fastest first. Raises as `library` does."""
    names = iter(partial(next, map(function("table_name"), count())), None)
    runs = function("table_is_supported")
    return [name.decode() for index, name in enumerate(names) if runs(index)]


def build_name() -> str:
    """Return the kernels' name and build. Raises as `library` does."""
    return f"{table()} {sha256_file(path())[:16]}"


def ggml_libraries(ggml: Any) -> list[Path]:
    """Return the files whose functions the plugin would use, if known. ggml: as ctypes loaded
    it."""
    text = ctypes.create_string_buffer(_PATHS_BYTES)
    if not function("libraries")(ggml._handle, text, len(text)):
        return []
    return [Path(line) for line in text.value.decode("utf-8", "surrogateescape").splitlines()]
