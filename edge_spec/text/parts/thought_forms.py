"""Finds out how a model writes its thoughts: from what its chat template makes of small
conversations, else from tags that the template or the vocabulary knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from edge_spec.errors import EdgeSpecError
from edge_spec.text.parts.answer_form import ThoughtForm
from edge_spec.text.plain_messages import THOUGHTS, Message

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
# Of messages, whether the prompt ends where the assistant begins, and values of the template.
Render = Callable[..., str]


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
