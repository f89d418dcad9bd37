"""Lets another thread end the pass of a session that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from edge_spec.errors import SessionError


class Interruption:
    """Ends passes of one session, which come one after the other."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._end: Callable[[], None] | None = None  # of the pass that runs
        self._is_asked = False

    def ask(self) -> None:
        """Ends the pass that runs, if its engine can, and lets no other one begin. Any thread may
        call."""
        with self._lock:
            self._is_asked = True
            if self._end is not None:
                self._end()

    def require_none(self) -> None:
        """Raises SessionError once it was asked for."""
        if self._is_asked:
            raise SessionError("the session was interrupted", remedy="Begin a new one.")

    @contextmanager
    def ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Around a pass. end: returns at once; it is not called after the block, when what it ends
        may be a pass of another session. Raises SessionError."""
        with self._lock:
            self.require_none()
            self._end = end
        try:
            yield
        finally:
            with self._lock:
                self._end = None
