"""The parts that an answer may have, and their incremental reader."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

from edge_spec.errors import UsageError
from edge_spec.text.parts.part import (
    EndedError,
    PartKind,
    PartReader,
    Steps,
    first_of,
    overlap,
)
from edge_spec.text.plain_messages import THOUGHTS, Tools

TEXT_TOKENS = 512  # default limit: small models repeat themselves up to the context's end
THOUGHT_TOKENS = 3584  # added for models that think


@dataclass(frozen=True)
class ThoughtForm:
    """The tags around a thought. ending: all that the template writes from the closing tag to the
    text, with whitespace and what opens the text."""

    opening: str
    closing: str
    ending: str

    @property
    def lead(self) -> str:
        """What opens the text after a thought, such as a channel's name."""
        return self.ending.partition(self.closing)[2].strip()

    @property
    def without_lead(self) -> ThoughtForm:
        """The form if the reader handles what opens the text."""
        before, closing, after = self.ending.partition(self.closing)
        space = after[: len(after) - len(after.lstrip())]
        return replace(self, ending=before + closing + space)

    def text_opening_after(self, prompt: str) -> str:
        """Return the part of `lead` that the prompt has not written yet."""
        shown = prompt.rstrip()
        return "" if self.is_passed_by(shown) else self.lead[overlap(shown, self.lead) :].strip()

    def is_opened_by(self, prompt: str) -> bool:
        """Return True if a thought follows the prompt."""
        return prompt.rstrip().endswith(self.opening)

    def is_passed_by(self, prompt: str) -> bool:
        """Return True if text follows the prompt: it has closed a thought, or opened the text."""
        shown, tags = prompt.rstrip(), re.split(r"(?=[<\[])", self.lead)
        return shown.endswith(self.closing) or shown.endswith("".join(tags[-2:]) or self.closing)

    def ending_after(self, text: str) -> str:
        """Return what ends a thought after this text, which may already contain a part of it."""
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
    """At most one thought at the beginning of an answer, and what follows it.

    - thought: None if the model has none.
    - is_opened: the prompt opens the thought.
    - is_begun: the prompt contains some of the thought.
    - is_closed: the prompt rules a thought out, though the model may still write one.
    - budget: maximum tokens of the thought; None: no limit.
    - tells_thought: report the thought as a part of its own; else as text.
    - text_opening: what opens the text if there is no thought.
    - calls: format of tool calls; None if all after the thought is text.
    - tools: those that may be called.
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


def answer_tokens(form: AnswerForm | None) -> int:
    """Return the default token limit: the text's, plus the thought's budget or THOUGHT_TOKENS."""
    if form is None or form.thought is None or form.is_closed:
        return TEXT_TOKENS
    return TEXT_TOKENS + (THOUGHT_TOKENS if form.budget is None else form.budget)


class AnswerReader(PartReader):
    """Reads a thought at the answer's beginning, and then text, later tags included. Whitespace
    around the thought is dropped."""

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
        while True:
            if self._held:
                self._add(PartKind.TEXT, self._take(len(self._held)))
            yield from self._more()

    def _read_opening(self, opening: str) -> Steps[bool]:
        """Return True if the answer begins with a thought; drop what opens the text."""
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
            # Possible calls are held back until something else follows.
            while mark != closing and not self._held.partition(closing)[2].strip():
                yield from self._more()
        except EndedError:
            is_call = self._read_last_calls(closing)
            if is_call or closing not in self._held:
                self._add_thought(len(self._held))
                raise
        self._add_thought(len(self._held.partition(closing)[0].rstrip()))
        self._held = self._held.lstrip().removeprefix(closing)
        self._add(PartKind.REASONING, "")

    def _read_ending(self, thought: ThoughtForm) -> Steps[None]:
        closing, lead = thought.closing, thought.lead
        while True:  # after a forced closing tag, the model may write its own
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
        """Read calls inside an unclosed thought, as some models write them. They only count if
        nothing else follows."""
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


# "auto": as in the template; "off": no thought; else the maximum number of tokens.
Reasoning = Literal["auto", "off"] | int
_CLOSING = re.compile(
    r"</(?:\w+:)?(?:think|thought|reasoning)|/THINK\]|END_THINKING|end_of_thought"
    r"|inner_suffix|<channel\|>|\u25c1/think"
)
# Opening and ending of thoughts, whitespace included, for templates that do not show them.
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
SWITCHES = ("enable_thinking", "thinking")  # template variables that turn thoughts on and off


def speaks_of_thoughts(form: str) -> bool:
    """Return True if a grammar closes the thought itself."""
    return _CLOSING.search(form) is not None


def read_reasoning(text: str) -> Reasoning:
    """Parse a user's input. Raises UsageError."""
    found: Any = int(text) if re.fullmatch("[0-9]{1,18}", text) else text
    thought_budget(found)
    return cast(Reasoning, found)


def thought_budget(reasoning: Reasoning | None) -> int | None:
    """Return the maximum tokens of a thought; None: no limit. Raises UsageError."""
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


def thought_form(
    source: str, render: Callable[..., str], added: Collection[str]
) -> ThoughtForm | None:
    """Return the thought tags of the template or vocabulary, and the template's text between
    thought and answer.

    render: "" if the template refuses. added: texts of added tokens.
    """
    known = [each for each in TAGS if each[0] in source or each[1].strip() in source]
    known += [
        (opening, ending) for opening, ending in TAGS if {opening, ending.strip()} <= set(added)
    ]
    if not known:
        return None
    opening, ending = known[0]
    answer = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(THOUGHTS, _THOUGHT)}
    text = render([{"role": "user", "content": "probe-user"}, answer], add_generation_prompt=False)
    closing = next(iter(_TAG.findall(ending)))
    shown = text.partition(_THOUGHT)[2].partition(_ANSWER)[0]
    return ThoughtForm(opening, closing, shown if closing in shown else ending)
