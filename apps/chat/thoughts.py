"""Shows what a model thinks before it answers: dim, and one line once it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from edge_spec.apps.chat.paint import harmless
from edge_spec.engine.thought_line import thought_line

if TYPE_CHECKING:
    from edge_spec import GenerationResult


def dim(text: str) -> Text:
    return Text(harmless(text), "dim")


def unfolded(result: GenerationResult | None) -> Text | str:
    """Returns all that was thought before an answer."""
    if result is None:
        return "No answer yet."
    if not result.reasoning.strip():
        return "The last answer has no thought."
    return dim(f"{result.reasoning.strip()}\n\n{thought_line(result)}")
