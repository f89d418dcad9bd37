"""Says which parts an answer may have, and reads them while it is written."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.parts.part import (
    EndedError,
    PartKind,
    PartReader,
    Steps,
    first_of,
    overlap,
)
from edge_spec.text.plain_messages import THOUGHTS, Tools

TEXT_TOKENS = 512  # where nobody says: small models repeat themselves, up to the context's end
THOUGHT_TOKENS = 3584  # beside them, of models that think


@dataclass(frozen=True)
class ThoughtForm:
    """A thought stands between two tags. ending: all that the model's template writes between a
    thought and the text after it: the closing tag, space, and what else the text is opened with."""

    opening: str
    closing: str
    ending: str

    @property
    def lead(self) -> str:
        """Returns what opens the text after a thought, such as the name of a channel."""
        return self.ending.partition(self.closing)[2].strip()

    @property
    def without_lead(self) -> ThoughtForm:
        """Returns the same for an answer whose text is opened by what follows the thought."""
        before, closing, after = self.ending.partition(self.closing)
        space = after[: len(after) - len(after.lstrip())]
        return replace(self, ending=before + closing + space)

    def text_opening_after(self, prompt: str) -> str:
        """Returns what is left of `lead` after this prompt, which has asked for an answer."""
        shown = prompt.rstrip()
        return "" if self.is_passed_by(shown) else self.lead[overlap(shown, self.lead) :].strip()

    def is_opened_by(self, prompt: str) -> bool:
        """Says whether what follows the prompt is a thought."""
        return prompt.rstrip().endswith(self.opening)

    def is_passed_by(self, prompt: str) -> bool:
        """Says whether what follows the prompt is the text: it has closed a thought, or opened the
        text as after one."""
        shown, tags = prompt.rstrip(), re.split(r"(?=[<\[])", self.lead)
        return shown.endswith(self.closing) or shown.endswith("".join(tags[-2:]) or self.closing)

    def ending_after(self, text: str) -> str:
        """Returns what ends a thought that is the end of this text, some of which may be there."""
        if begun := overlap(text, self.closing):
            return self.ending[self.ending.index(self.closing) + begun :]
        ends_line = text.endswith("\n\n") or (text.endswith("\n") and not self.is_opened_by(text))
        return self.ending.lstrip("\n") if ends_line else self.ending


class CallForm(Protocol):
    """How a model calls tools. markers: what calls begin with."""

    @property
    def markers(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class AnswerForm:
    """What may stand in an answer: at most one thought, at its beginning, and what follows it.

    thought: None where the model has none. is_opened: the prompt has opened it already. is_begun:
    the prompt has some of it, which the answer goes on with. is_closed: the prompt says that there
    is none, though the model may write one all the same. budget: tokens of the thought, after which
    it is ended; None: as many as the model wants. tells_thought: it is a part of its own, else of
    the text, as the model writes it. text_opening: what opens the text of an answer without a
    thought. calls: how the model calls tools, None where all that follows a thought is text. tools:
    those that may be called.
    """

    thought: ThoughtForm | None = None
    is_opened: bool = False
    is_begun: bool = False
    is_closed: bool = False
    budget: int | None = None
    tells_thought: bool = True
    text_opening: str = ""
    calls: CallForm | None = None
    tools: Tools = ()


def answer_tokens(
    form: AnswerForm | None,
    text_tokens: int = TEXT_TOKENS,
    thought_tokens: int = THOUGHT_TOKENS,
) -> int:
    """Returns the tokens of an answer where nobody says: those of the text, and room for the
    thought before it: its budget, if it has one. thought_tokens: 0 for no room beside the text's.
    """
    if form is None or form.thought is None or form.is_closed or not thought_tokens:
        return text_tokens
    return text_tokens + (thought_tokens if form.budget is None else form.budget)


class AnswerReader(PartReader):
    """Reads a thought, if the answer begins with one, and then text. What looks like a thought
    later on stays text. White space around the thought belongs to neither it nor the text."""

    def __init__(self, form: AnswerForm) -> None:
        self._answer = form
        super().__init__()

    def _read(self) -> Steps[None]:
        form = self._answer
        if form.thought is not None and form.tells_thought:
            with suppress(EndedError):
                if form.is_begun or (yield from self._read_opening(form.thought.opening)):
                    yield from self._read_thought(form.thought.closing)
                    yield from self._read_ending(form.thought)
        yield from self._read_rest()

    def _read_rest(self) -> Steps[None]:
        """Read what follows the thought."""
        while True:
            if self._held:
                self._add(PartKind.TEXT, self._take(len(self._held)))
            yield from self._more()

    def _read_opening(self, opening: str) -> Steps[bool]:
        """Return True if the answer begins with a thought. What opens its text is no text."""
        text_opening = self._answer.text_opening
        while not self._answer.is_opened:
            text = self._held.lstrip()
            if text.startswith(opening):
                self._held = text[len(opening) :]
                self._add(PartKind.REASONING, "")
                break
            if all(text == each or not each.startswith(text) for each in (opening, text_opening)):
                self._held = text.removeprefix(text_opening) if text_opening else self._held
                return False
            yield from self._more()
        while not self._held.strip():
            self._held = ""
            yield from self._more()
        self._held = self._held.lstrip()
        return True

    def _read_thought(self, closing: str) -> Steps[None]:
        calls = self._answer.calls if self._answer.tools else None
        marks, mark = (closing, *(calls.markers if calls else ())), ""
        try:
            while not mark:
                place, mark = first_of(marks, self._held)
                self._add_thought(len(self._held[:place].rstrip()))
                if not mark:
                    yield from self._more()
            # What may be calls is held back until something follows that is none.
            while mark != closing and not self._held.partition(closing)[2].strip():
                yield from self._more()
        except EndedError:
            is_call = self._read_last_calls(closing)
            if is_call or closing not in self._held:
                self._add_thought(len(self._held))
                raise
        self._add_thought(len(self._held.partition(closing)[0].rstrip()))
        self._add(PartKind.REASONING, "")
        self._held = self._held.lstrip().removeprefix(closing)

    def _read_ending(self, thought: ThoughtForm) -> Steps[None]:
        """Read what stands between the thought and the text."""
        closing, lead = thought.closing, thought.lead
        while True:  # one that was ended for the model may be ended by it, too
            self._held = self._held.lstrip()
            if self._held.startswith(closing):
                self._held = self._held.removeprefix(closing)
            elif closing.startswith(self._held):
                yield from self._more()
            else:
                break
        while lead.startswith(self._held) and self._held != lead:
            yield from self._more()
        self._held = self._held.removeprefix(lead)

    def _read_last_calls(self, closing: str) -> bool:
        """Read the calls of an answer whose thought was not ended before them, as some models write
        them. They are calls where nothing else follows, else the model has thought of them."""
        reader = type(self)(replace(self._answer, thought=None))
        names = {tool["function"]["name"] for tool in self._answer.tools}
        text = self._held.partition(closing)[0].strip()
        parts = [*reader.push(text), *reader.finish()]
        calls = [part for part in parts if part.kind is PartKind.CALL]
        heads = [part.call for part in calls if part.call is not None]
        others = "".join(part.text for part in parts if part.kind is not PartKind.CALL)
        if not heads or others or reader.is_cut or any(each.name not in names for each in heads):
            return False
        self._add(PartKind.REASONING, "")
        self._parts += calls
        self._held = ""
        return True

    def _add_thought(self, length: int) -> None:
        if length:
            self._add(PartKind.REASONING, self._take(length))


Render = Callable[..., str]  # makes a prompt; raises EdgeSpecError where the template refuses
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
    """Returns the tokens that a thought may have; None: any number. Raises UsageError."""
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
        messages = [{"role": "user", "content": "probe-user"}, answer]
        text = render(messages, add_generation_prompt=False)
    except EdgeSpecError:
        text = ""
    closing = next(iter(_TAG.findall(ending)))
    shown = text.partition(_THOUGHT)[2].partition(_ANSWER)[0]
    return ThoughtForm(opening, closing, shown if closing in shown else ending)
