"""What chat, server and sidecar have in common: an answer is stopped, and its rate is shown."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_spec import Generation

_WINDOW_S = 1.0  # that the rate is taken over
_MOST_COUNTS = 4096  # more than come in that time


class TokenRate:
    """Tokens a second over the last second."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque(maxlen=_MOST_COUNTS)  # when, and of how many

    def observe(self, num_tokens: int) -> None:
        """The time before the first tokens was the prompt's, so they do not count."""
        self._counts.append((time.monotonic(), num_tokens if self._counts else 0))

    @property
    def per_second(self) -> float | None:
        """Return None until tokens came over some time."""
        now, counts = time.monotonic(), tuple(self._counts)
        tokens = sum(count for when, count in counts if now - when < _WINDOW_S)
        span_s = min(now - counts[0][0], _WINDOW_S) if counts else 0.0
        return tokens / span_s if tokens and span_s else None


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
