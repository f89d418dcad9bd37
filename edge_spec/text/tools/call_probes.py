"""Conversations with calls of tools, which tell what a chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from edge_spec.errors import EdgeSpecError
from edge_spec.text.plain_messages import Message, Tools
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
from edge_spec.text.tools.keyed_probe import Calls
from edge_spec.text.tools.literals import TAG_PATTERN, num_shared, tags_of
from edge_spec.text.tools.part_list import IdStyle
from edge_spec.text.tools.rendered_form import RenderedCalls

Render = Callable[..., str]  # of messages and tools; raises EdgeSpecError
_LONG_ID = "call_probe00000000000000"
_THOUGHT = re.compile(
    r".*(?:</(?:\w+:)?(?:think|thought|reasoning)[^<>]*>|\[/THINK\]"
    r"|<\|END_THINKING\|>|<\|end_of_thought\|>)",
    re.DOTALL,
)
_TEXT = "probe-text"
(_VALUE,) = ARGUMENTS.values()


class CallProbes:
    """Conversations that are rendered to see what becomes of them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._system: Sequence[Message] = ()
        self._tools: Tools = TOOLS
        self.shows_tools = self._lists()
        self.tools_in_system = False
        if not self.shows_tools:
            self._tools, self._system = (), [with_tools({"role": "system", "content": ""}, TOOLS)]
            self.tools_in_system = self._lists()
            self._system = self._system if self.tools_in_system else ()
        said = [probe_message("assistant", ASSISTANT)]
        self._before, _, self._after = (self._tried(said, goes_on=False) or "").partition(ASSISTANT)
        plain = self._tried(said, goes_on=False, tools=()) or ""
        between = plain.partition(USER)[2].partition(ASSISTANT)[0]
        self._ends = [*tags_of(self._after), *tags_of(between)]

    def _lists(self) -> bool:
        return LISTED in (self._tried([]) or "")

    def prompt(self, silence: str | None, is_text: bool) -> str | None:
        """Returns a conversation with a call and its result; None where the template refuses it."""
        return self._tried([probe_call(silence, is_text), probe_message("tool", RESULT)])

    def without_tools(self) -> str | None:
        """Returns a conversation in which there are none."""
        return self._tried([], tools=())

    def shown(self, calls: Calls, silence: str | None) -> str | None:
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
        messages = [*self._system, probe_message("user", USER), *answer]
        try:
            if goes_on:
                return self._render(messages, tools)
            return self._render(messages, tools, add_generation_prompt=False)
        except EdgeSpecError:
            return None


def with_tools(message: Message, tools: Tools) -> Message:
    """Returns a message of the system with tools as some templates read them there."""
    functions = [tool["function"] for tool in tools]
    return {**message, "tools": json.dumps(functions, ensure_ascii=False)}


def _with_ids(message: Message, ids: Sequence[str]) -> Message:
    calls = [{**call, "id": id} for call, id in zip(message["tool_calls"], ids, strict=True)]
    return {**message, "tool_calls": calls}
