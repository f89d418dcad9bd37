"""Tells people of a thought in one line."""

from __future__ import annotations

from edge_spec.engine.results import FinishReason, GenerationResult

_EXACT_S = 60.0  # below it, tenths of seconds are told


def thought_line(result: GenerationResult) -> str:
    """Returns what is shown of a thought that has ended."""
    count = result.reasoning_n
    tokens = "1 token" if count == 1 else f"{count} tokens"
    return f"thought for {told_time(result.reasoning_ms / 1e3)} ({tokens})"


def cut_thought(result: GenerationResult) -> str | None:
    """Says why an answer has no text, where it ended within its thought."""
    if result.text.strip() or not result.reasoning or result.tool_calls:
        return None
    if result.finish_reason is FinishReason.LENGTH:
        return (
            f"the limit of {len(result.tokens)} tokens was reached within the thought: "
            "--max-tokens raises it, --reasoning N ends a thought after N tokens"
        )
    if result.finish_reason is FinishReason.STOP:
        return "the model ended its answer within the thought: --reasoning off asks for none"
    return None


def told_time(seconds: float) -> str:
    if seconds < _EXACT_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
