"""Finds out in which form a chat template wants calls of tools, from what it makes of some.

A form fits if its reader reads the same calls out of what the template has rendered; a template's
or a model's name is never looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from edge_spec.errors import EdgeSpecError
from edge_spec.text.parts.part import PartKind
from edge_spec.text.plain_messages import THOUGHTS, Message, Tools
from edge_spec.text.template_probes import (
    ARGUMENTS,
    ASSISTANT,
    CALLED,
    LISTED,
    RESULT,
    TOOLS,
    USER,
    probe_call,
    probe_message,
)
from edge_spec.text.tools.forms import FORMS, STATED
from edge_spec.text.tools.json_form import JsonForm
from edge_spec.text.tools.keyed_probe import Calls, keyed_form
from edge_spec.text.tools.literals import TAG_PATTERN, num_shared, tags_of
from edge_spec.text.tools.part_list import IdStyle
from edge_spec.text.tools.protocol import ToolForm
from edge_spec.text.tools.rendered_form import RenderedCalls, form_in

Render = Callable[..., str]  # of messages and tools; raises EdgeSpecError
_LONG_ID = "call_probe00000000000000"
_THOUGHT = re.compile(
    r".*(?:</(?:\w+:)?(?:think|thought|reasoning)[^<>]*>|\[/THINK\]"
    r"|<\|END_THINKING\|>|<\|end_of_thought\|>)",
    re.DOTALL,
)
_TEXT = "probe-text"
(_VALUE,) = ARGUMENTS.values()
_LIST = re.compile(r'\[\s*\{\s*"name":\s*"[^"]*",\s*"arguments":')  # an example of calls
_CALLABLE: Tools = [
    *TOOLS,
    {"type": "function", "function": {**TOOLS[0]["function"], "name": CALLED}},
]


@dataclass(frozen=True)
class NativeTools:
    """Says how a template that knows tools wants calls in messages.

    silences: contents of a message that only calls; None: it has none. takes_mappings, takes_texts:
    arguments as an object, and as JSON text of one. takes_several: calls in one message.
    shows_calls: else they have to stand in the content. shows_tools: else they have to be described
    in a message. takes_text, takes_thought: a text before calls in a message, also one with a
    thought; else the text has to be a message of its own. ids: those that it takes.
    """

    form: ToolForm
    silences: tuple[str | None, ...]
    takes_mappings: bool
    takes_texts: bool
    takes_several: bool
    shows_calls: bool = True
    shows_tools: bool = True
    takes_text: bool = True
    takes_thought: bool = True
    ids: IdStyle = IdStyle.ANY


def native_tools(render: Render) -> NativeTools | None:
    """Returns None if the template shows no calls, loses what they return, or has calls written in
    a form that none of ours is."""
    probes = _Probes(render)
    found: dict[tuple[str | None, bool], tuple[ToolForm, IdStyle]] = {}
    for is_text, silence in product((False, True), ("", None)):
        if is_text and not found and probes.shows_objects():
            break  # it would write a text as it is into a form that it writes objects in
        form = probes.form(silence, is_text)
        if form is not None and form == next(iter(found.values()), form):
            found[silence, is_text] = form
    if not found:
        return probes.stated()
    (silence, is_text), (form, ids) = next(iter(found.items()))
    return NativeTools(
        form,
        silences=tuple(dict.fromkeys(silence for silence, _ in found)),
        takes_mappings=any(not is_text for _, is_text in found),
        takes_texts=any(is_text for _, is_text in found),
        takes_several=probes.takes_several(silence, is_text),
        shows_tools=probes.shows_tools,
        takes_text=probes.takes_text(is_text),
        takes_thought=probes.takes_text(is_text, **dict.fromkeys(THOUGHTS, ASSISTANT)),
        ids=ids,
    )


class _Probes:
    """Conversations that are rendered to see what becomes of them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._tools: Tools = TOOLS
        self.shows_tools = LISTED in (self._tried([]) or "")
        self._tools = TOOLS if self.shows_tools else ()
        said = [probe_message("assistant", ASSISTANT)]
        self._before, _, self._after = (self._tried(said, goes_on=False) or "").partition(ASSISTANT)
        plain = self._tried(said, goes_on=False, tools=()) or ""
        between = plain.partition(USER)[2].partition(ASSISTANT)[0]
        self._ends = [*tags_of(self._after), *tags_of(between)]

    def form(self, silence: str | None, is_text: bool) -> tuple[ToolForm, IdStyle] | None:
        """Returns the form of calls in a message of these contents and arguments, and the ids that
        the template takes there."""
        whole = self._tried([probe_call(silence, is_text), probe_message("tool", RESULT)])
        if whole is None or RESULT not in whole:
            return None
        for style in (self.ids(silence, is_text), IdStyle.NAMED):
            rendered = self.rendered(silence, is_text, style)
            if rendered is None:
                continue
            for form in self._forms(rendered, style, silence, is_text):
                if _reads(form, rendered.one, 1) and (
                    rendered.two is None or _reads(form, rendered.two, 2)
                ):
                    return form, style
        return None

    def _forms(
        self, rendered: RenderedCalls, style: IdStyle, silence: str | None, is_text: bool
    ) -> Iterator[ToolForm]:
        yield from FORMS
        derived: ToolForm | None = form_in(rendered, style)
        if derived is not None:
            yield derived
        if not is_text:
            derived = keyed_form(lambda calls: self._shown(calls, silence))
        if derived is not None:
            yield derived

    def _shown(self, calls: Calls, silence: str | None) -> str | None:
        """Returns what the model has written where it calls so."""
        listed = [
            {
                "id": f"probe000{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls, start=1)
        ]
        message = {"role": "assistant", "content": silence, "tool_calls": listed}
        results = [{**probe_message("tool", RESULT), "tool_call_id": each["id"]} for each in listed]
        text = self._tried([message], goes_on=False) or self._tried([message, *results])
        last = [*calls[-1][1].values()][-1]
        return None if text is None else self._answer(text, str(last))

    def shows_objects(self) -> bool:
        """Says whether it shows calls with arguments that are objects."""
        texts = (self._tried([probe_call(silence, False)], goes_on=False) for silence in ("", None))
        return any(text is not None and _VALUE in text and CALLED in text for text in texts)

    def stated(self) -> NativeTools | None:
        """Returns the form that the template tells the model of, where it does not show calls."""
        without = self._tried([], tools=())
        if not self.shows_tools:
            return None
        for silence in ("", None):
            whole = self._tried([probe_call(silence, False), probe_message("tool", RESULT)])
            if whole is None or without is None or RESULT not in whole:
                continue
            for form in STATED:
                is_stated = _states(whole, form) and not _states(without, form)
                if is_stated and CALLED not in whole:
                    return NativeTools(form, (silence,), True, True, True, shows_calls=False)
        return None

    def takes_several(self, silence: str | None, is_text: bool) -> bool:
        """Says whether it shows each of two calls in a message."""
        results = [probe_message("tool", RESULT)] * 2
        one, two = (
            self._tried([probe_call(silence, is_text, times), *results[:times]]) or ""
            for times in (1, 2)
        )
        return two.count(_VALUE) > one.count(_VALUE)

    def takes_text(self, is_text: bool, **more: str) -> bool:
        """Says whether a text beside a call, and what more, is not refused, nor shown after it."""
        message = {**probe_call(_TEXT, is_text), **more}
        text = self._tried([message, probe_message("tool", RESULT)])
        return text is not None and not 0 <= text.find(CALLED) < text.find(_TEXT)

    def ids(self, silence: str | None, is_text: bool) -> IdStyle:
        """Says whether it refuses ids that are long."""
        message = _with_ids(probe_call(silence, is_text), [_LONG_ID])
        result = {**probe_message("tool", RESULT), "tool_call_id": _LONG_ID}
        return IdStyle.NINE if self._tried([message, result]) is None else IdStyle.ANY

    def rendered(self, silence: str | None, is_text: bool, style: IdStyle) -> RenderedCalls | None:
        texts = []
        ids: list[str] = []
        for times in (1, 2):
            message = probe_call(silence, is_text, times)
            if style is IdStyle.NAMED:
                ids = [style.made(CALLED, index) for index in range(times)]
                message = _with_ids(message, ids)
            else:
                ids = [call["id"] for call in message["tool_calls"]]
            results = [{**probe_message("tool", RESULT), "tool_call_id": id} for id in ids]
            text = self._tried([message], goes_on=False)
            texts.append(self._answer(text or self._tried([message, *results]) or ""))
        one, two = texts
        if not one:
            return None
        is_double = two.count(_VALUE) == 2 * one.count(_VALUE)
        shown = () if style is IdStyle.NAMED else tuple(ids)  # these have the name in them
        return RenderedCalls(one, two if is_double else None, shown)

    def _answer(self, text: str, last: str = _VALUE) -> str:
        """Returns the part that the model has written, without thoughts. last: a value in it, after
        which it ends."""
        start = num_shared(self._before, text)
        for tag in TAG_PATTERN.finditer(text):
            if tag.start() < start < tag.end():
                start = tag.start()
        text = text[start:]
        before, found, after = text.partition(CALLED)
        if thought := _THOUGHT.match(before):
            text = before[thought.end() :] + found + after
        ends = [text.find(tag, text.rfind(last)) for tag in self._ends]
        end = min((end for end in ends if end >= 0), default=None)
        return text.removesuffix(self._after) if end is None else text[:end]

    def _tried(
        self, answer: Sequence[Message], goes_on: bool = True, tools: Tools | None = None
    ) -> str | None:
        """goes_on: whether the assistant speaks next."""
        tools = self._tools if tools is None else tools
        messages = [probe_message("user", USER), *answer]
        try:
            if goes_on:
                return self._render(messages, tools)
            return self._render(messages, tools, add_generation_prompt=False)
        except EdgeSpecError:
            return None


def _states(text: str, form: ToolForm) -> bool:
    """Says whether a prompt tells the model of this form."""
    if isinstance(form, JsonForm) and form.is_bare:
        return _LIST.search(text) is not None
    return any(marker in text for marker in form.markers)


def _with_ids(message: Message, ids: Sequence[str]) -> Message:
    calls = [{**call, "id": id} for call, id in zip(message["tool_calls"], ids, strict=True)]
    return {**message, "tool_calls": calls}


def _reads(form: ToolForm, text: str, times: int) -> bool:
    """Says whether the form's reader reads the calls of a probe there, and no text."""
    reader = form.reader(_CALLABLE)
    parts = [*reader.push(text), *reader.finish()]
    if any(part.kind is PartKind.TEXT and part.text.strip() for part in parts):
        return False
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.call is not None:
            calls.append((part.call.name, ""))
        if part.kind is PartKind.CALL:
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    try:
        read = [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return False
    return not reader.is_cut and read == [(CALLED, ARGUMENTS)] * times
