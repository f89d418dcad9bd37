"""How a model writes its thoughts, and what a prompt says of the thought before an answer: nothing,
that there is none, or how long it may be."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection
from typing import Any, Literal, cast

from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.parts.answer_form import ThoughtForm
from edge_spec.text.plain_messages import THOUGHTS

# Of messages, whether the prompt ends where the assistant begins, and values of the template.
Render = Callable[..., str]
# "auto": as the template has it; "off": none; else a number of tokens, after which it is ended.
Reasoning = Literal["auto", "off"] | int
_CLOSING = re.compile(
    r"</(?:\w+:)?(?:think|thought|reasoning)|/THINK\]|END_THINKING|end_of_thought"
    r"|inner_suffix|<channel\|>|\u25c1/think"
)
# What opens a thought and what ends it, with the space around, where a template shows neither.
TAGS = (
    *((f"<{n}>", f"\n</{n}>\n\n") for n in ("think", "thinking", "thought", "reasoning")),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "\n<|end_of_thought|>\n\n"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "\n<channel|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
)
_TAG = re.compile(r"<[^<>]+>|\[[^\[\]]+\]|\u25c1[^\u25b7]+\u25b7")
_THOUGHT, _ANSWER = "probe-thought", "probe-answer"
SWITCHES = ("enable_thinking", "thinking")  # by which templates turn thoughts on and off


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


def thought_form(source: str, render: Render, added: Collection[str]) -> ThoughtForm | None:
    """Returns the tags that the template or the vocabulary knows, with what the template writes
    between a thought and a text.

    source: of a chat template; render: raises EdgeSpecError for what the template refuses. added:
    the texts of added tokens.
    """
    known = [each for each in TAGS if each[0] in source or each[1].strip() in source]
    known += [
        (opening, ending) for opening, ending in TAGS if {opening, ending.strip()} <= set(added)
    ]
    if not known:
        return None
    opening, ending = known[0]
    answer = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(THOUGHTS, _THOUGHT)}
    try:
        text = render([{"role": "user", "content": "probe-user"}, answer], False)
    except EdgeSpecError:
        text = ""
    closing = next(iter(_TAG.findall(ending)))
    shown = text.partition(_THOUGHT)[2].partition(_ANSWER)[0]
    return ThoughtForm(opening, closing, shown if closing in shown else ending)
