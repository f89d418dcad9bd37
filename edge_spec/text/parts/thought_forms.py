"""Finds out how a model writes its thoughts."""

from __future__ import annotations

from edge_spec.text.parts.answer_form import ThoughtForm

# What opens a thought and what closes it, where a template does not write one itself.
_TAGS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning")),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)


def thought_form(source: str) -> ThoughtForm | None:
    """source: of a chat template."""
    for opening, closing in _TAGS:
        if closing in source or opening in source:
            return ThoughtForm(opening, closing, f"\n{closing}\n\n")
    return None
