"""Finds the format in which a chat template writes calls of tools.

Small conversations are rendered, and the row of `FORMATS` fits that writes the calls as the
template does. The name of a template or of a model is never looked at.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from edge_spec.errors import EdgeSpecError
from edge_spec.text.plain_messages import (
    ARGUMENTS,
    ASSISTANT,
    CALLED,
    LISTED,
    RESULT,
    THOUGHTS,
    TOOLS,
    USER,
    Message,
    Tools,
    joined,
    probe_call,
    probe_message,
    with_call_arguments,
)
from edge_spec.text.tools.call_format import CallFormat
from edge_spec.text.tools.call_shape import SHORT_ID, TAG
from edge_spec.text.tools.formats import (
    FORMATS,
    GENERIC,
    HARMONY,
    PYTHON,
    STATED,
    ToolForm,
    described,
)

Render = Callable[..., str]  # of messages and tools; raises EdgeSpecError
_LIST = re.compile(r'\[\s*\{\s*"name":\s*"[^"]*",\s*"arguments":')  # an example of calls
_PYTHON = re.compile(r"\[\w+\(\w+=[^()]*\)")
_TEXT = "probe-text"
(_VALUE,) = ARGUMENTS.values()


@dataclass(frozen=True)
class NativeTools:
    """Says how a template that knows tools wants calls in messages.

    takes_several: calls in one message. takes_text: before calls, also with a thought; else the
    text has to be a message of its own. takes_any_id: else ids have nine letters and digits.
    shows_calls, shows_results: else they have to be in contents. shows_tools: else they have to be
    described in a message, or given with the system's one (tools_in_system).
    """

    form: ToolForm
    takes_several: bool = True
    takes_text: bool = True
    takes_any_id: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    shows_tools: bool = True
    tools_in_system: bool = False


# For templates without any: calls and results are text, tools are described.
SPELLED = NativeTools(GENERIC, shows_calls=False, shows_results=False, shows_tools=False)


def native_tools(render: Render, tokens: Callable[[], Collection[str]]) -> NativeTools | None:
    """Return None if the template shows no calls and tells of no format, or has them written in one
    that none of ours is.

    tokens: the added ones of the model, which tell of its format where the template does not.
    """
    probes = _Probes(render)
    found = probes.shown()
    if found is None:
        return _stated(probes, tokens())
    form, num_calls = found
    return NativeTools(
        form,
        takes_several=num_calls > 1,
        takes_text=probes.takes_text(),
        takes_any_id=probes.text(_conversation("", "call_probe00000000000000")) != "",
        shows_tools=probes.shows_tools,
        tools_in_system=probes.tools_in_system,
    )


class _Probes:
    """Conversations that are rendered to see what becomes of them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._called = cache(self._call)
        self._system: Sequence[Message] = ()
        self._tools: Tools = TOOLS
        self.shows_tools = LISTED in self.text([])
        self.tools_in_system = False
        if not self.shows_tools:
            self._tools, self._system = (), [with_tools({"role": "system", "content": ""}, TOOLS)]
            self.tools_in_system = LISTED in self.text([])
            self._system = self._system if self.tools_in_system else ()
        said = self.text([probe_message("assistant", ASSISTANT)], goes_on=False)
        self._beginnings = [said.partition(ASSISTANT)[0], self.text([]) or said]

    def text(
        self, answer: Sequence[Message], *, goes_on: bool = True, tools: Tools | None = None
    ) -> str:
        """Return what the template makes of a conversation, "" where it refuses it. goes_on:
        whether the assistant speaks next."""
        tools = self._tools if tools is None else tools
        messages = [*self._system, probe_message("user", USER), *answer]
        options: dict[str, Any] = {} if goes_on else {"add_generation_prompt": False}
        try:
            return self._render(messages, tools, **options)
        except EdgeSpecError:
            return ""

    def shown(self) -> tuple[ToolForm, int] | None:
        """Return the format of calls, and how many of a message the template shows so, 2 standing
        for any number."""
        if RESULT not in self.text(_conversation()):
            return None
        forms: list[ToolForm] = [HARMONY, *FORMATS.values()]
        for times, shape, form in product((2, 1), _SHAPES, forms):
            if self._shows(form, times, shape):
                return form, times
        return None

    def _shows(self, form: ToolForm, times: int, shape: Callable[[str], str]) -> bool:
        """Return True if the template shows so many calls of a message as the format writes them.
        shape: what counts of a text."""
        calls, text = self._called(times)
        written, text = shape(form.written(calls)), shape(text)
        if isinstance(form, CallFormat) and form.is_bare:
            return text.startswith(tuple(shape(each) + written for each in self._beginnings))
        return written in text

    def _call(self, times: int) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Return calls, and what the template makes of them; "" where it does not show them all."""
        answer, *results = _conversation("", *(f"probe000{index + 1}" for index in range(times)))
        text = self.text([answer], goes_on=False) or self.text([answer, *results])
        return answer["tool_calls"], text if text.count(_VALUE) >= times else ""

    def takes_text(self) -> bool:
        """Return True if neither a text beside a call, nor one with a thought, is refused or shown
        after it."""
        message, *results = _conversation(_TEXT)
        thought = dict.fromkeys(THOUGHTS, ASSISTANT)
        texts = [self.text([each, *results]) for each in (message, {**message, **thought})]
        return all(text and not 0 <= text.find(CALLED) < text.find(_TEXT) for text in texts)


def _conversation(content: str = "", *ids: str) -> list[Message]:
    """Return a message with calls of these ids, else with one call, and their results."""
    ids = ids or ("probe0001",)
    results = [{**probe_message("tool", RESULT), "tool_call_id": id} for id in ids]
    return [probe_call(content, ids), *results]


def _squeezed(text: str) -> str:
    """Return a text without what formats leave open: space, and which quotes there are."""
    return re.sub(r"\s+", "", text).replace("'", '"')


_SHAPES: tuple[Callable[[str], str], ...] = (str, _squeezed)


def with_tools(message: Message, tools: Tools) -> Message:
    """Return a message of the system with tools as some templates read them there."""
    functions = [tool["function"] for tool in tools]
    return {**message, "tools": json.dumps(functions, ensure_ascii=False)}


def _stated(probes: _Probes, tokens: Collection[str]) -> NativeTools | None:
    """Return the format that the template tells the model of, or else the one whose tags are
    tokens, where calls are not shown."""
    if not (probes.shows_tools or probes.tools_in_system):
        return None
    without = probes.text([], tools=())
    whole = probes.text(_conversation())
    # Of Python's calls, what some templates show is not what they tell the model to write.
    forms = [PYTHON] if _VALUE in whole else STATED
    told = (form for form in forms if _states(whole, form) and not _states(without, form))
    spelled = (form for form in forms if _tags(form) and _tags(form).issubset(tokens))
    form = next(told, next(spelled, None)) if whole else None
    if form is None:
        return None
    return NativeTools(
        form,
        shows_calls=False,
        shows_results=RESULT in whole,
        shows_tools=probes.shows_tools,
        tools_in_system=probes.tools_in_system,
    )


def _states(text: str, form: CallFormat) -> bool:
    """Return True if a prompt tells the model of this format."""
    if tags := _tags(form):
        return all(tag in text for tag in tags)
    return (_LIST if form.keyed is None else _PYTHON).search(text) is not None


def _tags(form: CallFormat) -> set[str]:
    return set(TAG.findall(form.opening + form.closing))


Turn = tuple[Message, Sequence[Message]]  # a message, and the results that follow it


def native_history(
    messages: Sequence[Message], tools: Tools, native: NativeTools
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render."""
    turns = [part for each in _turns(messages) for part in _parts(*each, native)]
    if not native.takes_any_id:
        turns = list(_with_ids(turns))
    messages = [_native(each, native) for message, results in turns for each in (message, *results)]
    if native.shows_tools or not tools:
        return messages, tools
    system: Message = {"role": "system", "content": ""}
    if native.tools_in_system:
        system = with_tools(system, tools)
    else:
        system = {**system, "content": described(tools, native.form)}
    return _with_system(system, messages), ()


def _turns(messages: Sequence[Message]) -> Sequence[Turn]:
    turns: list[tuple[Message, list[Message]]] = []
    for message in messages:
        if message["role"] == "tool" and turns:
            turns[-1][1].append(message)
        else:
            turns.append((message, []))
    return turns


def _parts(message: Message, results: Sequence[Message], native: NativeTools) -> Iterator[Turn]:
    """Yield a turn in parts: the text before its calls, where the template has no place for that,
    and each of several calls, where it shows one in a message."""
    calls = message.get("tool_calls") or ()
    text = message.get("content") if calls else None
    if text and not native.takes_text:
        yield {"role": message["role"], "content": text}, ()
        message = {name: value for name, value in message.items() if name != "content"}
    if native.takes_several or len(calls) < 2:
        yield message, results
        return
    last = len(calls) - 1
    for index, call in enumerate(calls):
        own = {"role": message["role"]} if index else message
        yield {**own, "tool_calls": [call]}, results[index : None if index == last else index + 1]


def _with_ids(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield turns with short ids. Those that it takes stay as they are; others
    become the same ones each time."""
    count = 0
    for message, results in turns:
        calls = message.get("tool_calls") or ()
        ids = [_short_id(call, count + index) for index, call in enumerate(calls)]
        count += len(ids)
        if calls:
            calls = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": calls}
        own = [{**each, "tool_call_id": id} for each, id in zip(results, ids, strict=False)]
        yield message, [*own, *results[len(own) :]]


def _with_system(system: Message, messages: Sequence[Message]) -> Sequence[Message]:
    if messages and messages[0]["role"] == "system":
        return [joined(messages[0], system), *messages[1:]]
    return [system, *messages]


def _native(message: Message, native: NativeTools) -> Message:
    calls = message.get("tool_calls")
    if message["role"] == "tool" and not native.shows_results:
        return _spelled(message, native.form)
    if not calls:
        return message
    calls = [_native_call(call, native) for call in calls]
    if not native.shows_calls:
        return _spelled({**message, "tool_calls": calls}, native.form)
    calls = [{"type": "function", **call} for call in calls]
    return {**message, "tool_calls": calls}


def _native_call(call: Mapping[str, Any], native: NativeTools) -> Mapping[str, Any]:
    """The call with arguments that are there. Where they are written one by one, what is no object,
    such as the arguments of a call that was cut off, becomes an argument."""
    arguments = call["function"].get("arguments")
    arguments = {} if arguments is None else arguments
    if native.form.keyed is not None and not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return with_call_arguments(call, arguments)


def _spelled(message: Message, form: ToolForm) -> Message:
    """The message without calls and results: both are text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message.get("content") or "", form.written(calls)]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(part for part in parts if part)}


def _short_id(call: Mapping[str, Any], index: int) -> str:
    given = call.get("id")
    if isinstance(given, str) and SHORT_ID.fullmatch(given):
        return given
    known = given if isinstance(given, str) else str(index)
    return hashlib.sha256(known.encode()).hexdigest()[:9]
