"""Looks up functions of llama.cpp that `llama.h` does not have, and no wheel promises to keep.

Single rows by the kernel of wider passes, on a CPU: ggml's flash attention shares the cells of a
single row out among the threads, and sums in another order than it does for several rows (ggml-
cpu/ops.cpp). Its backend has a switch that turns such kernels off, `ggml_backend_cpu_set_use_ref`,
but llama.h does not lead to the backend of a context: its scheduler does, which a method of the C++
class gives. Where a build does not export all of these, there is no switch, and whether rows agree
is measured in any case.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HANDLE = ctypes.c_void_p
_SCHEDULER = "_ZNK13llama_context9get_schedEv"  # llama_context::get_sched() const


def steady_rows(llama: Any, context: int) -> Callable[[bool], None] | None:
    """llama: the library as ctypes has loaded it. Returns the switch of a context, None where there
    is none."""
    functions = _functions(llama)
    if functions is None:
        return None
    scheduler_of, num_backends, backend_of, is_cpu, switch = functions
    scheduler = scheduler_of(context)
    for number in reversed(range(num_backends(scheduler))):
        backend = backend_of(scheduler, number)
        if is_cpu(backend):
            return lambda on: switch(backend, on)
    return None


def _functions(llama: Any) -> tuple[Any, ...] | None:
    if sys.platform == "win32":
        return None  # its C++ names are others
    try:
        base, cpu = (_beside(llama, name) for name in ("libggml-base", "libggml-cpu"))
        return (
            _bound(llama, _SCHEDULER, [_HANDLE], _HANDLE),
            _bound(base, "ggml_backend_sched_get_n_backends", [_HANDLE], ctypes.c_int),
            _bound(base, "ggml_backend_sched_get_backend", [_HANDLE, ctypes.c_int], _HANDLE),
            _bound(cpu, "ggml_backend_is_cpu", [_HANDLE], ctypes.c_bool),
            _bound(cpu, "ggml_backend_cpu_set_use_ref", [_HANDLE, ctypes.c_bool], None),
        )
    except (OSError, AttributeError, StopIteration):
        return None


def _beside(llama: Any, name: str) -> ctypes.CDLL:
    """The library of this name in the same directory, which is loaded already."""
    folder = Path(llama._name).parent
    return ctypes.CDLL(str(next(iter(sorted(folder.glob(f"{name}.*"))))))


def _bound(library: Any, name: str, arguments: list[Any], result: Any) -> Any:
    function = library[name]
    function.argtypes, function.restype = arguments, result
    return function
