"""How fast an answer grows."""

from __future__ import annotations

import time
from collections import deque

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
