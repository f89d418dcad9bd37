"""What a prompt says of the thought before an answer: nothing, that there is none, or how long it
may be."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any, Literal, cast

from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.parts.answer_form import ThoughtForm
from edge_spec.text.parts.thought_forms import SWITCHES

# "auto": as the template has it; "off": none; else a number of tokens, after which it is ended.
Reasoning = Literal["auto", "off"] | int
_CLOSING = re.compile(
    r"</(?:\w+:)?(?:think|thought|reasoning)|/THINK\]|END_THINKING|end_of_thought"
    r"|inner_suffix|<channel\|>|\u25c1/think"
)
Render = Callable[..., str]


def speaks_of_thoughts(form: str) -> bool:
    """Says whether a grammar closes the thought itself."""
    return _CLOSING.search(form) is not None


def read_reasoning(text: str) -> Reasoning:
    """Reads what a person typed. Raises UsageError for what is none of `Reasoning`."""
    found: Any = int(text) if re.fullmatch("[0-9]{1,18}", text) else text
    thought_budget(found)
    return cast(Reasoning, found)


def thought_budget(reasoning: Reasoning | None) -> int | None:
    """Returns the tokens that a thought may have, None for as many as the model wants. Raises
    UsageError for what is none of `Reasoning`."""
    if reasoning in (None, "auto"):
        return None
    if reasoning == "off":
        return 0
    if isinstance(reasoning, bool) or not isinstance(reasoning, int) or reasoning < 0:
        raise UsageError(
            f"reasoning is {reprlib.repr(reasoning)}",
            remedy='It is "auto", "off", or the number of tokens that a thought may have.',
        )
    return reasoning


def prompt_for(budget: int, form: ThoughtForm | None, render: Render) -> str:
    """Returns the prompt for an answer whose thought may have so many tokens.

    render: gives the prompt with other values of the template's. Of a thought of no tokens, the
    prompt says that there is none, if the template has a switch for that; else it ends the thought
    that it opens, as such templates write an empty one.
    """
    try:
        prompt = render(**dict.fromkeys(SWITCHES, budget > 0))
    except EdgeSpecError:
        prompt = render()
    if budget == 0 and form is not None and form.is_opened_by(prompt):
        return prompt + form.ending_after(prompt)
    return prompt
