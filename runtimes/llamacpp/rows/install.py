"""Installs the kernels for few rows into llama.cpp if they are right in its build. If not,
llama.cpp stays as it is, and one line says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated
from edge_spec.core.model import ScoredTokens
from edge_spec.errors import UsageError
from edge_spec.runtimes.llamacpp.rows import library
from edge_spec.storage.atomic import sha256_file
from edge_spec.storage.measurements import Quantity

VARIABLE = "EDGE_SPEC_ROWS"  # environment variable, "on" or "off"
TABLE_VARIABLE = "EDGE_SPEC_ROWS_KERNELS"  # the name of the kernels to use
_PORTABLE = "portable"  # slower than llama.cpp's own
_ATTENTION = 2  # bit of `takes`

_TIMEOUT_S = 20.0  # 100 times the usual

# A build's key to why the plugin does not fit it, None if it does.
_FAULT: Quantity[str, str | None] = Quantity("kernels", str, lambda: TypeAdapter(str | None))


@dataclass(frozen=True)
class Rows:
    """The kernels in force. table: None for llama.cpp's own, with a reason; takes_attention:
    whether attention, too, is the same in passes of any width."""

    table: str | None
    reason: str | None = None
    takes_attention: bool = False

    @property
    def description(self) -> str:
        if self.table is not None:
            return f"rows: {self.table}"
        return f"rows: off, {self.reason}"

    def describe(self, load: library.Load) -> str:
        if self.table is None:
            return self.description
        if load.num_failed:
            return "rows: off, there was not enough memory for the weights"
        if not load.num_packed:
            why = "there are no kernels for its types" if load.left else "as asked for"
            return f"rows: off, {why}"
        left = ", ".join(f"{count} of {name}" for name, count in load.left.items())
        scored = f", {load.num_scored} tokens scored" if load.num_scored else ""
        all_packed = f"rows: {self.table}, {load.num_packed} matrices{scored}"
        return all_packed + (left and f", not {left}")


def install(ggml: Any) -> Rows:
    """Install the kernels before a model opens, as llama.cpp lists buffer types then. ggml: as
    ctypes loaded it. Raises UsageError for a bad environment variable."""
    reason = _llama_refusal()
    if reason is not None:
        return Rows(None, reason)
    try:
        files, table = library.ggml_libraries(ggml), library.table()
        if not files:
            return Rows(None, "this build of llama.cpp exports too little")
        hashes = [sha256_file(file) for file in [*files, library.path()]]
        key = hashlib.sha256("\n".join([*hashes, table]).encode()).hexdigest()
        reason = build_fault(key, Path(ggml._name))
        if reason is None:
            every = (1 << len(library.TYPES)) - 1
            refused = library.function("install")(ggml._handle, every, 1)
            reason = refused.decode() if refused is not None else None
        if reason is not None:
            return Rows(None, reason)
        return Rows(table, None, bool(library.function("takes")() & _ATTENTION))
    except (OSError, AttributeError) as error:
        return Rows(None, " ".join(str(error).split()))


def wanted() -> str:
    """Return the kernels and their build for a fitting llama.cpp; "" for none. Raises UsageError as
    `install` does."""
    return library.build_name() if _llama_refusal() is None else ""


def refusal() -> str | None:
    """Return why the kernels cannot be used here, or None. Raises UsageError for a bad environment
    variable."""
    try:
        return _find_refusal()
    except (OSError, AttributeError) as error:
        return " ".join(str(error).split())


def _find_refusal() -> str | None:
    switch = os.environ.get(VARIABLE, "")
    if switch not in ("", "on", "off"):
        raise UsageError(
            f"{VARIABLE} is {switch!r}", remedy="Set it to on or off, or leave it out."
        )
    if switch == "off":
        return f"{VARIABLE}=off"
    if not library.path().is_file():
        return "this installation was built without a C++ compiler"
    name, names = os.environ.get(TABLE_VARIABLE, ""), library.tables()
    if name and name not in names:
        raise UsageError(
            f"{TABLE_VARIABLE} names kernels {name!r}, which this processor or build does not have",
            remedy=f"Set it to {' or '.join(names)}, or leave it out for the fastest.",
        )
    if library.table() == _PORTABLE and name != _PORTABLE:
        return "there are none for this processor's instructions"
    return None


def _llama_refusal() -> str | None:
    if sys.platform == "win32":
        return "llama.cpp's libraries for Windows do not export what they take"
    return refusal()


def build_fault(key: str, ggml: Path) -> str | None:
    """Return why the plugin does not fit this build, or None, tested once in an isolated process.
    ggml: the library to load there."""
    known = _FAULT.read(key)
    if known is not None:
        return known.value
    from edge_spec.runtimes.llamacpp.rows.self_test import run

    reason = None
    try:
        isolated(run, str(ggml), timeout_s=_TIMEOUT_S)
    except NoAnswerError as error:  # the machine may be busy: retry next time
        return f"its test did not end: {error}"
    except IsolatedError as error:
        reason = f"its test failed: {error}"
    _FAULT.keep(key, reason)
    return reason


@contextmanager
def loading(
    rows: Rows, *, wants_stock: bool = False, scored_tokens: ScoredTokens | None = None
) -> Iterator[library.Load]:
    """Yield a record, filled afterwards, of what this thread's load gives to the kernels.
    scored_tokens: rows to keep in the output matrix; None: all."""
    load = library.Load()
    if rows.table is None:
        yield load
        return
    scored = scored_tokens or ScoredTokens(b"")
    library.function("begin_load")(int(wants_stock), scored.ids, len(scored))
    try:
        yield load
    finally:
        library.function("end_load")(ctypes.byref(load))
        load.num_scored = len(scored) if load.num_trimmed else 0
