"""Calls devices so that the process survives losing one.

A backend reports a loss by an uncaught C++ exception or ggml_abort, which end the process. So calls
run in workers: a failing call blocks its thread for good, its caller gets DeviceError, and no
device is used again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from threading import Event
from typing import Any, NoReturn, TypeVar

from edge_spec.core.callbacks import library_callback
from edge_spec.errors import DeviceError
from edge_spec.runtimes.llamacpp.compute_thread import Worker, current_worker
from edge_spec.runtimes.llamacpp.library import NAME, Library

_Result = TypeVar("_Result")
_REMEDY = "Start again; if it stays, use --device cpu or a newer driver."
_Handler = ctypes.CFUNCTYPE(None)
_AbortHandler = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


_CALLS = (
    "load_model",
    "open_context",
    "llama_synchronize",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
)
_FREES = ("llama_model_free", "llama_free")


@cache
def device_library(library: Library, is_guarded: bool) -> Library:
    """Return the library for devices, whose passes skip the compute thread. is_guarded: a lost
    device raises DeviceError, which is impossible with RPC servers."""
    direct = library.replacing(run=lambda function, *arguments: function(*arguments))
    return DeviceGuard(direct).guarded() if is_guarded else direct


class DeviceGuard:
    """Guards all models. lost: why no device is used again."""

    def __init__(self, library: Library) -> None:
        self.lost: str | None = None
        self._library = library
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []  # last used first: its thread is warm
        # Must live as long as the process.
        self._handlers = _Handler(self._thrown), _AbortHandler(self._aborted)
        library.ggml.ggml_set_abort_callback(self._handlers[1])
        set_terminate = _set_terminate()
        if set_terminate is not None:
            set_terminate(self._handlers[0])

    def guarded(self) -> Library:
        """Return the library with calls that raise DeviceError after a loss."""
        calls = {name: partial(self._run, getattr(self._library, name)) for name in _CALLS}
        frees = {name: self._freeing(getattr(self._library, name)) for name in _FREES}
        return self._library.replacing(run=self._run, **calls, **frees)

    def _run(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        if self.lost is not None:
            raise DeviceError(self.lost, remedy=_REMEDY)
        try:
            worker = self._idle.pop()
        except IndexError:  # all work for other threads
            worker = self._new_worker()
        try:
            result: _Result = worker.call(function, arguments)
        finally:
            if not worker.is_lost:
                self._idle.append(worker)
        if worker.is_lost:
            raise DeviceError(self.lost or "", remedy=_REMEDY)
        return result

    def _new_worker(self) -> Worker:
        worker = Worker("edge-spec-device")
        self._workers.add(worker)
        return worker

    def _freeing(self, function: Callable[[int], None]) -> Callable[[int], None]:
        """Freeing a lost device would wait for locks forever."""
        return lambda handle: None if self.lost is not None else function(handle)

    @library_callback
    def _thrown(self) -> None:
        log = self._library.log
        self._lose(log.errors_after(log.num_errors - 1) or "its backend threw an exception")

    @library_callback
    def _aborted(self, message: bytes | None) -> None:
        told = (message or b"").decode("utf-8", "replace")
        self._lose(told.split(": ", 1)[-1].strip())  # drop the source line

    def _lose(self, reason: str) -> NoReturn:
        """Block this thread, since returning ends the process; exit if no caller waits."""
        worker = current_worker()
        if worker is None or worker not in self._workers:
            line = f"edge-spec: {NAME} cannot go on: {reason}. {_REMEDY}"
            print(line, file=sys.stderr, flush=True)
            os._exit(1)
        self.lost = f"{NAME} has lost a device: {reason}"
        worker.lose()
        while True:
            Event().wait()


def _set_terminate() -> Callable[[Any], Any] | None:
    """Return llama.cpp's std::set_terminate; None on Windows, where it is per thread."""
    names = {"linux": "libstdc++.so.6", "darwin": "libc++abi.dylib"}
    try:
        found: Any = ctypes.CDLL(names[sys.platform])._ZSt13set_terminatePFvvE
    except (KeyError, OSError, AttributeError):
        return None
    found.argtypes, found.restype = [_Handler], ctypes.c_void_p
    function: Callable[[Any], Any] = found
    return function
