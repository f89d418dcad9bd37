"""Ends a command early: after a signal, or because nobody reads what it writes.

Imports nothing that takes time: signals are to be handled from the start.
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

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # those that the system has
_BY_SIGNAL = 128  # is added to its number, as shells do
INTERRUPTED = _BY_SIGNAL + signal.SIGINT
READER_LEFT = _BY_SIGNAL + 13  # SIGPIPE, which Windows lacks and Python ignores


class EndSignals:
    """The first signal becomes KeyboardInterrupt, so that files and processes are cleaned up; from
    then on they do what the system has them do, which ends even a process that hangs."""

    def __init__(self) -> None:
        self._came: int | None = None
        self._taken: list[int] = []
        self._unheard = 0  # those that came since Python last called a handler

    def acquire(self) -> None:
        """Watches the signals from now on, but for those that whoever started the process has
        turned off, as nohup does."""
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is None:
                continue
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._end)
                self._taken.append(number)

    def watch(self) -> None:
        """While the main thread is in a call of a library, Python calls no handler: from now on,
        the second signal that waits for that ends the process. After `prepare_streams`: it opens
        files."""
        reader, writer = os.pipe()
        if sys.platform != "win32":  # where it need not be so
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
        """Returns the exit status of a process that a signal ended; None where none came."""
        return None if self._came is None else _BY_SIGNAL + self._came

    def release(self) -> None:
        """Gives signals back to the system, which has them do what they usually do: nothing is left
        to clean up."""
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
    """Standard streams that are closed become empty ones: their numbers would go to the next files
    that are opened, which libraries would then print into. The others take any text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for given in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(given, TextIOWrapper):  # bytes or characters that the terminal lacks
            given.reconfigure(errors="replace")
