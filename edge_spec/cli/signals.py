"""End a command early, after a signal or when nobody reads its output.

Imports nothing slow, since signals must be handled from the start.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from threading import Thread
from types import FrameType

from edge_spec.core.callbacks import comes_later

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # some exist on one system only
_BY_SIGNAL = 128  # shells add it to the signal's number
INTERRUPTED = _BY_SIGNAL + signal.SIGINT
READER_LEFT = _BY_SIGNAL + 13  # SIGPIPE, which Windows lacks and Python ignores


class EndSignals:
    """Turn the first signal into KeyboardInterrupt, so that files and processes are cleaned up.
    Then restore the system's handlers, so that a further signal ends even a process that hangs."""

    def __init__(self) -> None:
        self._came: int | None = None
        self._taken: list[int] = []
        self._unheard = 0  # signals since Python last called a handler

    def acquire(self) -> None:
        """Handle the signals, except those that the parent process ignores, as nohup does."""
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is None:
                continue
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._end)
                self._taken.append(number)

    def watch(self) -> None:
        """From now on, end the process at the second signal that Python has not handled.

        Python calls no handler while the main thread is inside a library call. Call this after
        `prepare_streams`, as it opens files.
        """
        reader, writer = os.pipe()
        if sys.platform != "win32":  # Windows does not require it
            os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        Thread(target=self._watch, args=(reader,), daemon=True).start()

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if signal.getsignal(number[0]) == self._end:
                self._unheard += 1
                if self._unheard > 1:
                    os._exit(_BY_SIGNAL + number[0])

    @property
    def status(self) -> int | None:
        """The exit status after a signal, or None if none came."""
        return None if self._came is None else _BY_SIGNAL + self._came

    def release(self) -> None:
        """Restore the system's handlers, once nothing is left to clean up."""
        for number in self._taken:
            signal.signal(number, signal.SIG_DFL)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._unheard = 0
        if comes_later(number, frame):
            return
        for each in self._taken:
            if signal.getsignal(each) == self._end:
                signal.signal(each, signal.SIG_DFL)
        self._came = number
        raise KeyboardInterrupt


def prepare_streams() -> None:
    """Replace closed standard streams by empty ones, and let the others print any text. Otherwise
    the next opened files would get their numbers, and libraries would print into them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for given in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(given, TextIOWrapper):  # replace what its encoding lacks
            given.reconfigure(errors="replace")
