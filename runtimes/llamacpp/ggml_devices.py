"""ggml's devices: of this machine, of a backend that was compiled apart, and of RPC servers."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from edge_spec.errors import DeviceError
from edge_spec.models.devices import free_bytes
from edge_spec.runtimes.llamacpp.library import LibraryDevice, LibraryLog

NAME = "llama.cpp"  # whose ggml it is
BACKEND = "GGML_BACKEND_PATH"  # of the environment: a backend beside those compiled in
_IS_UNIFIED = sys.platform == "darwin" and platform.machine() == "arm64"  # all memory is one
_CPU, _INTEGRATED_GPU, _ACCELERATED_CPU = 0, 2, 3  # ggml_backend_dev_type
_HANDLE, _SIZE = ctypes.c_void_p, ctypes.c_size_t
# Of ggml_backend_*, which llama-cpp-python does not bind.
_UNBOUND: tuple[tuple[str, list[Any], Any], ...] = (
    ("dev_count", [], _SIZE),
    ("dev_get", [_SIZE], _HANDLE),
    ("dev_name", [_HANDLE], ctypes.c_char_p),
    ("dev_description", [_HANDLE], ctypes.c_char_p),
    ("dev_type", [_HANDLE], ctypes.c_int),
    ("dev_memory", [_HANDLE, *[ctypes.POINTER(_SIZE)] * 2], None),
    ("reg_by_name", [ctypes.c_char_p], _HANDLE),
    ("reg_dev_count", [_HANDLE], _SIZE),
    ("reg_dev_get", [_HANDLE, _SIZE], _HANDLE),
    ("reg_get_proc_address", [_HANDLE, ctypes.c_char_p], _HANDLE),
)


def bind_devices(ggml: Any) -> None:
    """Says what ggml's functions take and return."""
    # Once: a thread that calls a function while another one binds it reads freed memory.
    for name, arguments, result in _UNBOUND:
        function = getattr(ggml, f"ggml_backend_{name}")
        function.argtypes, function.restype = arguments, result


def load_backend(ggml: Any, log: LibraryLog) -> None:
    """A backend that was compiled apart, as the library's own programs load it.

    Raises DeviceError.
    """
    path = os.environ.get(BACKEND)
    ggml.ggml_backend_load.argtypes, ggml.ggml_backend_load.restype = [ctypes.c_char_p], _HANDLE
    if path and not ggml.ggml_backend_load(os.fsencode(path)):
        raise DeviceError(
            f"{NAME} cannot load the backend {path}: {log.errors_after(0) or 'no reason is given'}",
            remedy=f"Compile it from the sources of the installed llama-cpp-python, or unset "
            f"{BACKEND}.",
        )


def devices(ggml: Any, servers: Sequence[str]) -> list[LibraryDevice]:
    """Those of servers first, as llama.cpp has them: fewer results cross the network."""
    found = []
    for server in servers:
        registry = _add_server(ggml)(server.encode())
        count = ggml.ggml_backend_reg_dev_count(registry) if registry else 0
        handles = [ggml.ggml_backend_reg_dev_get(registry, i) for i in range(count)]
        found += [_device(ggml, handle, server) for handle in handles]
    local = map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count()))
    return found + [_device(ggml, handle) for handle in local]


def _end(message: bytes) -> None:
    """Called where the library is about to abort; it would start a debugger for a trace."""
    reason = message.decode("utf-8", "replace").split(": ", 1)[-1].strip()  # without its source
    remedy = "Start an RPC server that is gone again."
    print(f"edge-spec: {NAME} cannot go on: {reason}. {remedy}", file=sys.stderr, flush=True)
    os._exit(1)


_END = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_end)


def _add_server(ggml: Any) -> Callable[[bytes], int | None]:
    """The second call for a server gives the same devices.

    Ends the process where a server does not answer, and from then on where one dies.
    """
    ggml.ggml_set_abort_callback(_END)
    registry = ggml.ggml_backend_reg_by_name(b"RPC")
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
    found: Callable[[bytes], int | None] = ctypes.CFUNCTYPE(_HANDLE, ctypes.c_char_p)(address)
    return found


def _device(ggml: Any, handle: int, server: str | None = None) -> LibraryDevice:
    kind = ggml.ggml_backend_dev_type(handle)
    is_cpu = kind in (_CPU, _ACCELERATED_CPU)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    return LibraryDevice(
        name=ggml.ggml_backend_dev_name(handle).decode(),
        description=ggml.ggml_backend_dev_description(handle).decode(),
        is_cpu=is_cpu,
        free_bytes=(is_cpu and free_bytes()) or free.value,
        total_bytes=total.value,
        handle=handle,
        server=server,
        shares_memory=kind == _INTEGRATED_GPU or _IS_UNIFIED,
    )
