"""One thread that makes all passes on the processor, whoever asks for them.

GNU's OpenMP keeps a pool of threads for each thread that has called it. Once all pools together
have more threads than there are processors, they sleep at each of a pass's hundreds of barriers
instead of spinning: it takes half as long again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from queue import SimpleQueue
from threading import Lock, Thread, get_ident, local
from typing import Any, TypeVar

from edge_spec.core import turns

_Result = TypeVar("_Result")
# Not one of the names by which a command ends by force (cli/start.py): a pass at that time has a
# thread that waits for it, which is joined or has such a name.
_NAME = "llamacpp-compute"
_here = local()  # .worker: what runs a call in this thread


def current_worker() -> Worker | None:
    """Returns the worker whose thread this is."""
    worker: Worker | None = getattr(_here, "worker", None)
    return worker


class _Call:
    """One thing to do, which begins once however often it was asked for."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.caller = get_ident()
        self.asked_s = self.begun_s = time.perf_counter()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._begun = Lock()
        self.ended = Lock()  # as a signal: the fastest that there is
        self.ended.acquire()

    def begin(self) -> bool:
        """Tells whether this is the first time."""
        return self._begun.acquire(blocking=False)

    def end(self) -> None:
        self.is_done = True
        self.ended.release()


class Worker:
    """A thread that does one thing at a time for whoever waits for it."""

    def __init__(self, name: str) -> None:
        self.is_lost = False  # its thread stays where it is for good
        self._asked: SimpleQueue[_Call] = SimpleQueue()
        self._current: _Call | None = None
        Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., _Result], arguments: tuple[Any, ...]) -> _Result:
        """Returns, or raises, what the function does. What a signal's handler raises comes after a
        call that has begun, as after a direct one; one that has not begun never does."""
        asked = _Call(function, arguments)
        interrupt: BaseException | None = None
        while not asked.is_done:
            try:
                if interrupt is None:
                    turns.begin_waiting(asked.caller)
                self._asked.put(asked)  # once more after an interrupt, which may have come before
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
            finally:  # or what they hold would wait for a collection
                del error, interrupt, asked
        result: _Result = asked.result
        return result

    def lose(self) -> None:
        """Ends the present call for its caller. For this thread alone, which does nothing more."""
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
                except BaseException as error:  # is the caller's
                    asked.error = error
                self._current = None
                asked.end()
            del asked


_worker: Worker | None = None  # of this process
_starting = Lock()


def in_compute_thread(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function that does the same in the thread that all of these share."""

    @wraps(function)
    def call(*arguments: Any) -> _Result:
        return (_worker or _start()).call(function, arguments)

    return call


def _start() -> Worker:
    global _worker
    with _starting:
        _worker = _worker or Worker(_NAME)
        return _worker


def _forget() -> None:
    """A process that was forked has none of the threads of its parent."""
    global _worker, _starting
    _worker, _starting = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
