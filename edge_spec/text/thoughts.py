"""How a model writes its thoughts, and what a prompt says of the thought before an answer: nothing,
that there is none, or how long it may be."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any, Literal, cast

from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.parts.answer_form import ThoughtForm
from edge_spec.text.plain_messages import THOUGHTS, Message

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
)
_MENTION = re.compile("think|thought|reason|inner_prefix", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]+>|\[[^\[\]]+\]|\u25c1[^\u25b7]+\u25b7")
_ASKED = "probe-user"
_QUESTION: Message = {"role": "user", "content": _ASKED}
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
    """source: of a chat template; render: raises EdgeSpecError for what the template refuses.
    added: the texts of added tokens."""
    found = _shown(render) if _MENTION.search(source) else None
    if found is not None:
        return found
    for opening, ending in TAGS:
        closing = ending.strip()
        if opening in source or closing in source or {opening, closing} <= set(added):
            return ThoughtForm(opening, closing, ending)
    return None


def _shown(render: Render) -> ThoughtForm | None:
    """Reads the form in what is rendered of a message with a thought."""
    answer = {"role": "assistant", "content": _ANSWER}
    thoughtful = answer | dict.fromkeys(THOUGHTS, _THOUGHT)
    try:
        begun = render([_QUESTION], True)
        text = render([_QUESTION, thoughtful], False)
    except EdgeSpecError:
        return None
    before, found, after = text.partition(_THOUGHT)
    ending, is_answered, _ = after.partition(_ANSWER)
    closing = _TAG.search(ending)
    if not found or not is_answered or closing is None:
        return None
    before, begun = before.rpartition(_ASKED)[2], begun.rpartition(_ASKED)[2]
    on, off = (_switched(render, value) for value in (True, False))
    for prompts in ([begun, *on], [begun, *on, *off]):
        if opening := _opening(before, closing[0], prompts):
            return ThoughtForm(opening, closing[0], ending)
    return None


def _switched(render: Render, value: bool) -> list[str]:
    """Returns a prompt with thoughts turned on or off, from where the question has ended."""
    try:
        prompt = render([_QUESTION], True, **dict.fromkeys(SWITCHES, value))
    except EdgeSpecError:
        return []
    return [prompt.rpartition(_ASKED)[2]]


def _opening(before: str, closing: str, prompts: Sequence[str]) -> str:
    """Returns what stands between the beginning of the assistant's turn and its thought.

    before: all that stands between the question and the thought. prompts: those that ask for an
    answer, from where the question has ended.
    """
    # They part where a thought is opened, unless each of them opens one; not within a tag.
    letters = zip(before, *prompts, strict=False)
    turn = "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, letters))
    turn = re.sub(r"[<\[\u25c1][^<>\[\]\u25c1\u25b7]*$", "", turn)
    for text in (before, prompts[0]):
        opening = text[len(turn) :].strip()
        if opening and closing not in opening:
            return opening
    tags: list[str] = _TAG.findall(turn)
    is_last = bool(tags) and turn.rstrip().endswith(tags[-1])
    return tags[-1] if is_last and _words(tags[-1]) & _words(closing) else ""


def _words(tag: str) -> set[str]:
    return set(re.findall("[a-z]{4,}", tag.lower().replace("_", " "))) - {"start", "begin"}
