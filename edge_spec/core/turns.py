"""Threads that wait for their turn, which counts neither as hanging nor as slow."""

from __future__ import annotations

import time
from threading import local

_own = local()  # .waited_s: total of this thread
_waiting: set[int] = set()  # thread identifiers


def begin_waiting(thread: int) -> None:
    _waiting.add(thread)


def end_waiting(thread: int) -> None:
    _waiting.discard(thread)


def is_waiting(thread: int | None) -> bool:
    return thread in _waiting


def add_wait(seconds: float) -> None:
    _own.waited_s = getattr(_own, "waited_s", 0.0) + seconds


def own_clock() -> float:
    """Return seconds of a clock that stops while this thread waits for its turn."""
    return time.perf_counter() - float(getattr(_own, "waited_s", 0.0))
