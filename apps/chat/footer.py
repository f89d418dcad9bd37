"""The line below the input: how fast the answer comes, and what speculation does for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len

from edge_spec import PartKind
from edge_spec.apps.chat.conversation import ChatConversation
from edge_spec.engine.thought_line import told_time
from edge_spec.fitting.memory import format_bytes, resident_bytes

if TYPE_CHECKING:
    from edge_spec import GenerationResult

_WINDOW_S = 1.0
_MOST_COUNTS = 4096  # more than come in that time
_SEPARATOR = " | "


class Meter:
    """Tokens a second of the last second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque(maxlen=_MOST_COUNTS)  # when, and of how many
        self._began = clock()

    def restart(self) -> None:
        self._counts.clear()
        self._began = self._clock()

    def observe(self, num_tokens: int) -> None:
        if not self._counts:  # the time before the first tokens was the prompt's
            self._began = self._clock()
            num_tokens = 0
        self._counts.append((self._clock(), num_tokens))

    @property
    def per_second(self) -> float | None:
        """Returns None until tokens came over some time."""
        now = self._clock()
        recent = [(when, count) for when, count in tuple(self._counts) if now - when < _WINDOW_S]
        span_s = min(now - self._began, _WINDOW_S)
        tokens = sum(count for _, count in recent)
        return tokens / span_s if tokens and span_s else None


def is_thinking(running: GenerationResult) -> bool:
    """Says whether the latest token of an answer is one of a thought."""
    return bool(running.tokens) and running.tokens[-1].kind is PartKind.REASONING


def footer(conversation: ChatConversation, meter: Meter, note: str, width: int) -> str:
    """Shows as many of the figures as fit into `width` cells, the most telling first: those of the
    answer that is being written, or of the last one. note: what else there is to say."""
    parts = [note] if note else []
    running = conversation.running
    result = running or conversation.last
    if result is not None:
        stats = result.stats
        rate = meter.per_second if running is not None else stats.predicted_per_second
        if running is not None and is_thinking(running):
            parts.append(f"thinking {told_time(running.reasoning_ms / 1e3)}")
        if rate is not None:
            parts.append(f"{rate:.0f} tokens/s")
        elif not result.tokens:
            parts.append(f"reading {conversation.reading}".rstrip())
        speedup = stats.speedup
        if running is not None:
            plain = conversation.plain_per_second
            speedup = rate / plain if rate is not None and plain is not None else None
        parts += [f"{speedup:.2f}x"] if speedup is not None else []
        if stats.acceptance_rate is not None:
            parts.append(f"{stats.acceptance_rate:.0%} accepted")
    parts.append(f"draft {conversation.engine.drafter}")
    memory = resident_bytes()
    parts += [format_bytes(memory)] if memory is not None else []
    parts += ["exact"] if conversation.exact else []
    parts += [conversation.engine.name] if running is None else ["Ctrl-C stops"]
    while len(parts) > 1 and cell_len(_SEPARATOR.join(parts)) > width:
        parts.pop()
    return _SEPARATOR.join(parts)
