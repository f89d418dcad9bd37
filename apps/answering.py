"""What chat, server and sidecar have in common: an answer is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_spec import Generation


class Stop:
    """Stops the running generation, from any thread, even before it exists."""

    def __init__(self) -> None:
        self._lock = RLock()  # a signal may come while it is held
        self._generation: Generation | None = None
        self.requested = False

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let `request` stop what is watched within the block; forget earlier requests."""
        self.requested = False
        try:
            yield
        finally:
            self._generation = None

    def watch(self, generation: Generation) -> None:
        with self._lock:
            self._generation = generation
            if self.requested:
                generation.cancel()

    def request(self) -> None:
        with self._lock:
            self.requested = True
            if self._generation is not None:
                self._generation.cancel()
