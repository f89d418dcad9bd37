"""The sidecar's process: its pipes, and how it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import FileIO
from queue import Empty, Full, Queue
from threading import Lock, Thread
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from edge_spec import Engine
from edge_spec.apps.sidecar.messages import MAX_LINE_BYTES
from edge_spec.apps.sidecar.sidecar import Sidecar
from edge_spec.core.callbacks import comes_later

MAX_WAITING = 16  # lines read ahead
_LOOK_S = 1.0  # between two looks whether there is an end to all waiting


class Wire:
    """Has the process's standard input and output for itself: whatever else prints, native
    libraries and child processes included, does so on standard error, and reads nothing.

    `send` may be called from any thread. Where nobody reads any more, it calls `on_lost` and
    drops the message.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        sys.stdout.flush()
        self._on_lost = on_lost
        self._lock = Lock()
        # Duplicates are not inherited, so no child process keeps the other program's pipes open.
        self._source: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._sink = FileIO(os.dup(1), "wb")
        os.dup2(2, 1)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (no file of the file system)
            os.dup2(nothing.fileno(), 0)

    def read(self) -> bytes | None:
        """The next line without its end, of one that is too long the beginning; None at the end of
        input, which cuts a line short."""
        with suppress(OSError):  # a terminal that went away
            line = end = self._source.readline(MAX_LINE_BYTES + 1)
            while end and not end.endswith(b"\n"):
                end = self._source.readline(MAX_LINE_BYTES)
            if end:
                return line.removesuffix(b"\n")
        return None

    @property
    def is_left(self) -> bool:
        """Says whether the other program has closed its end, whatever is still to be read; False if
        the system does not tell."""
        if not hasattr(select, "poll"):
            return False
        poll = select.poll()
        poll.register(self._source, 0)  # its end is told in any case
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def send(self, message: dict[str, Any]) -> None:
        """Blocks while the other side does not read. ASCII only, so that no reader takes one of
        Unicode's line separators for the end of a line."""
        left = memoryview(json.dumps(message, allow_nan=False).encode("ascii") + b"\n")
        try:
            with self._lock:
                while left:
                    left = left[self._sink.write(left) :]
        except OSError:
            self._on_lost()


class _Ended(BaseException):
    """SIGTERM, or the other program is gone."""


def run(open_engine: Callable[[], Engine]) -> None:
    """Serves what comes in on standard input until `exit`, its end, SIGTERM, or until nobody reads
    standard output; then cancels everything and returns, for the process to end. It ends like this
    while the model is opened, too. Raises what `open_engine` raises."""
    signal.signal(signal.SIGTERM, _raise_ended)
    with suppress(_Ended), ExitStack() as ending:
        ending.callback(_ignore_the_end)
        wire = Wire(on_lost=_end)
        lines: Queue[bytes | None] = Queue(MAX_WAITING)
        Thread(target=_read, args=(wire, lines), daemon=True).start()
        sidecar = Sidecar(open_engine(), wire.send)
        ending.callback(sidecar.close)
        ending.callback(_ignore_the_end)  # before it
        while (line := _next(lines)) is not None and sidecar.handle(line):
            pass


def _next(lines: Queue[bytes | None]) -> bytes | None:
    """Looks up now and then: the system may give a signal to any thread, which does not wake this
    one, and only this one handles it."""
    while True:
        with suppress(Empty):
            return lines.get(timeout=_LOOK_S)


def _read(wire: Wire, lines: Queue[bytes | None]) -> None:
    while True:
        if (line := wire.read()) is None:
            with suppress(Full):
                lines.put_nowait(None)
            _keep_ending()
        while True:
            try:
                lines.put(line, timeout=_LOOK_S)
                break
            except Full:
                if wire.is_left:
                    _keep_ending()


def _keep_ending() -> NoReturn:
    """Ends the process at the second try where the first signal came just before the main thread
    began to wait in a write, which it does not wake."""
    while True:
        _end()
        time.sleep(_LOOK_S)


def _end() -> None:
    """The main thread, whatever it waits for, sees SIGTERM."""
    if hasattr(signal, "pthread_kill"):
        main = threading.main_thread().ident
        assert main is not None  # it runs
        signal.pthread_kill(main, signal.SIGTERM)
    else:  # Windows: seen when the main thread next runs Python
        signal.raise_signal(signal.SIGTERM)


def _raise_ended(number: int, frame: FrameType | None) -> None:
    if comes_later(number, frame):
        return
    _ignore_the_end()
    raise _Ended


def _ignore_the_end() -> None:
    """Keeps the end of the process from being interrupted by another reason to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
