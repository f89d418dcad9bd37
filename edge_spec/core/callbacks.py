"""Callbacks from libraries. An exception from a signal handler is lost within one, so handlers that
raise check `comes_later` first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import Timer, main_thread
from types import CodeType, FrameType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_AGAIN_S = 0.05
_codes: set[CodeType] = set()


def library_callback(function: _Function) -> _Function:
    """Mark a function as a callback of a library."""
    _codes.add(function.__code__)
    return function


def comes_later(number: int, frame: FrameType | None) -> bool:
    """Return whether a handler must not raise now; it is then called again soon."""
    while frame is not None and frame.f_code not in _codes:
        frame = frame.f_back
    if frame is None:
        return False
    if hasattr(signal, "pthread_kill"):
        later = Timer(_AGAIN_S, signal.pthread_kill, (main_thread().ident, number))
    else:
        later = Timer(_AGAIN_S, signal.raise_signal, (number,))
    later.daemon = True
    later.start()
    return True
