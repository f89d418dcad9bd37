"""Lines of JSON on what the process began with as standard input and output."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from threading import Lock
from typing import Any, BinaryIO

MAX_LINE_BYTES = 4 * 1024 * 1024


class LineTooLongError(Exception):
    """The line was read to its end and dropped."""


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
        """The next line without its end; None at the end of input, which cuts a line short.

        Raises LineTooLongError for one of more than MAX_LINE_BYTES.
        """
        with suppress(OSError):  # a terminal that went away
            line = self._source.readline(MAX_LINE_BYTES + 1)
            if line.endswith(b"\n"):
                return line[:-1]
            too_long = len(line) > MAX_LINE_BYTES
            while line and not line.endswith(b"\n"):
                line = self._source.readline(MAX_LINE_BYTES)
            if too_long and line:
                raise LineTooLongError
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
