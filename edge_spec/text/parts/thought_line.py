"""Tells of a thought in one line."""

from __future__ import annotations

_EXACT_S = 60.0  # below it, tenths of seconds are told


def thought_line(reasoning_ms: float, num_tokens: int) -> str:
    """Returns what is shown of a thought that has ended."""
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    return f"thought for {told_time(reasoning_ms / 1e3)} ({tokens})"


def told_time(seconds: float) -> str:
    if seconds < _EXACT_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
