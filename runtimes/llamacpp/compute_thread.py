"""One thread that runs all CPU passes.

GNU's OpenMP keeps a thread pool per calling thread. Pools with more threads in total than
processors sleep instead of spinning at each of a pass's hundreds of barriers, and passes take 1.5
times as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread, get_ident, local
from typing import Any, TypeVar

from edge_spec.core import turns

_Result = TypeVar("_Result")
# Not a name that makes commands exit by force (cli/start.py): the thread that waits for a pass is
# joined or has such a name.
_NAME = "llamacpp-compute"
_here = local()  # .worker: this thread's Worker


def current_worker() -> Worker | None:
    worker: Worker | None = getattr(_here, "worker", None)
    return worker


class _Call:
    """A call that runs at most once, however often it is queued."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.caller = get_ident()
        self.asked_s = self.begun_s = time.perf_counter()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._begun = Lock()
        self.ended = Lock()  # the fastest signal there is
        self.ended.acquire()

    def begin(self) -> bool:
        """Return True only the first time."""
        return self._begun.acquire(blocking=False)

    def end(self) -> None:
        self.is_done = True
        self.ended.release()


class Worker:
    """A thread that runs one call at a time while the caller waits."""

    def __init__(self, name: str) -> None:
        self.is_lost = False  # its thread is blocked for good
        self._asked: SimpleQueue[_Call] = SimpleQueue()
        self._current: _Call | None = None
        Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., _Result], arguments: tuple[Any, ...]) -> _Result:
        """Return or raise what the function does. A signal handler's exception is raised after a
        call that has begun and cancels one that has not."""
        asked = _Call(function, arguments)
        interrupt: BaseException | None = None
        while not asked.is_done:
            try:
                if interrupt is None:
                    turns.begin_waiting(asked.caller)
                self._asked.put(asked)  # again if an interrupt came before
                asked.ended.acquire()
            except BaseException as raised:
                interrupt = raised
                if asked.begin():
                    turns.end_waiting(asked.caller)
                    raise
        turns.add_wait(asked.begun_s - asked.asked_s)
        error = interrupt or asked.error
        if error is not None:
            try:
                raise error
            finally:  # break reference cycles
                del error, interrupt, asked
        result: _Result = asked.result
        return result

    def lose(self) -> None:
        """End the caller's wait. Only for this worker's thread, which must then block."""
        self.is_lost = True
        if self._current is not None:
            self._current.end()

    def _run(self) -> None:
        _here.worker = self
        while True:
            asked = self._asked.get()
            if asked.begin():
                asked.begun_s = time.perf_counter()
                turns.end_waiting(asked.caller)
                self._current = asked
                try:
                    asked.result = asked.function(*asked.arguments)
                except BaseException as error:  # for the caller
                    asked.error = error
                self._current = None
                asked.end()
            del asked


_worker: Worker | None = None
_starting = Lock()


def in_compute_thread(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return or raise what the function does in the shared compute thread."""
    return (_worker or _start()).call(function, arguments)


def _start() -> Worker:
    global _worker
    with _starting:
        _worker = _worker or Worker(_NAME)
        return _worker


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _worker, _starting
    _worker, _starting = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
