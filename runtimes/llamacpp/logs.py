"""Passes what the library has to say on to `logging`, never to the terminal."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from typing import Any

from edge_spec.core.callbacks import library_callback

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
# ggml_log_level; a warning of the library is rarely one for the user.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_ERROR, _CONTINUED = 4, 5
_MAX_LINE = 160  # characters of an error's line in an error of ours


class LibraryLog:
    """Receives the library's lines. Attribute `callback` has to live as long as the library, which
    calls it with `data`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"edge_spec.{name}")
        self._logger.addHandler(logging.NullHandler())  # or errors would go to stderr
        self.num_errors = 0
        self._errors: deque[str] = deque(maxlen=8)
        self._line, self._level = "", 0
        self._receiver = LogCallback(self._receive)
        self.callback, self.data = self._receiver, ctypes.c_void_p()

    def send_through(self, filter: Any) -> None:
        """Has each line go through a function of C, which drops those below `least_level` and calls
        `data` with the others. A thread that loads a model would wait for the interpreter with each
        of hundreds of lines that nobody reads."""
        self.callback = ctypes.cast(filter, LogCallback)
        self.data = ctypes.cast(self._receiver, ctypes.c_void_p)

    @property
    def least_level(self) -> int:
        """The first of the library's levels that anybody listens to by now."""
        heard = (level for level, each in _LEVELS.items() if self._logger.isEnabledFor(each))
        return min(heard, default=_ERROR)

    def errors_after(self, num_errors: int) -> str:
        """The lines of errors that came since there were `num_errors`, the last few."""
        count = min(self.num_errors - num_errors, len(self._errors))
        return " ".join(list(self._errors)[len(self._errors) - count :])

    @library_callback
    def _receive(self, level: int, text: bytes | None, data: Any) -> None:
        if level != _CONTINUED:
            self._level = level
        *lines, self._line = (self._line + (text or b"").decode("utf-8", "replace")).split("\n")
        for line in filter(None, map(str.strip, lines)):
            if self._level == _ERROR:
                self._errors.append(line[:_MAX_LINE])  # it may quote a damaged file
                self.num_errors += 1
            self._logger.log(_LEVELS.get(self._level, logging.DEBUG), line)
