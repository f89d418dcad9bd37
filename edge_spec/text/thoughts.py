"""Thoughts that a chat template opens where the assistant begins.

An answer that is held to a form from its first token would have to be written inside of them: its
prompt closes them first.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from edge_spec.errors import EdgeSpecError

# What opens a thought, at the end of a prompt, and what closes it.
_TAGS = (
    (re.compile(r"<((?:\w+:)?(?:think|thinking|thought|thoughts|reasoning))>\s*$"), r"</\1>"),
    (re.compile(r"\[(THINK)\]\s*$"), r"[/\1]"),
    (re.compile(r"<\|(START_THINKING)\|>\s*$"), "<|END_THINKING|>"),
    (re.compile(r"<\|(begin_of_thought)\|>\s*$"), "<|end_of_thought|>"),
)
_CLOSING = re.compile(
    r"</(?:\w+:)?(?:think|thought|reasoning)|/THINK\]|END_THINKING|end_of_thought"
)
Render = Callable[..., str]


def opens_thought(prompt: str) -> bool:
    """Says whether what follows the prompt is a thought."""
    return any(opening.search(prompt) for opening, _ in _TAGS)


def speaks_of_thoughts(form: str) -> bool:
    """Says whether a grammar closes the thought itself."""
    return _CLOSING.search(form) is not None


def closed_thought(prompt: str, render: Render) -> str:
    """Returns the prompt, with the thought closed that it opens, if it does.

    render: gives the prompt with other values of the template's. One that knows enable_thinking
    closes the thought itself; else it is empty, as such templates write an empty one.
    """
    for opening, closing in _TAGS:
        found = opening.search(prompt)
        if found is None:
            continue
        try:
            own = render(enable_thinking=False, thinking=False)
        except EdgeSpecError:
            own = prompt
        if own != prompt and not opens_thought(own):
            return own
        gap = "" if prompt.endswith("\n\n") else "\n" if prompt.endswith("\n") else "\n\n"
        return f"{prompt}{gap}{found.expand(closing)}\n\n"
    return prompt
