"""Puts calls, their results and tools into a conversation as its chat template wants them."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec.text.plain_messages import (
    THOUGHTS,
    Message,
    Tools,
    joined,
    meant_arguments,
    with_call_arguments,
)
from edge_spec.text.tools.detection import NativeTools, ToolForm, with_tools
from edge_spec.text.tools.formats import GENERIC, described
from edge_spec.text.tools.part_list import IdStyle


def native_history(
    messages: Sequence[Message], tools: Tools, native: NativeTools
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render with a template that knows calls."""
    messages = [part for each in messages for part in _apart(each, native)]
    messages = messages if native.takes_several else _one_by_one(messages)
    messages = [_native(each, native) for each in messages]
    if native.ids is not IdStyle.ANY:
        ids = _Ids(native.ids)
        messages = [ids.fitted(message) for message in messages]
    if native.shows_tools or not tools:
        return messages, tools
    system: Message = {"role": "system", "content": ""}
    if native.tools_in_system:
        system = with_tools(system, tools)
    else:
        system = {**system, "content": described(tools, native.form)}
    return _with_system(system, messages), ()


def spelled_history(messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    """Returns messages of text alone, and before them a description of the tools."""
    spelled = [_spelled(each, GENERIC) for each in messages]
    if not tools:
        return spelled
    return _with_system({"role": "system", "content": described(tools)}, spelled)


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


def _apart(message: Message, native: NativeTools) -> Sequence[Message]:
    """Returns a message of calls, after its text where the template has no place for that."""
    text = message.get("content") if message.get("tool_calls") else None
    has_thought = any(message.get(name) for name in THOUGHTS)
    if not text or (native.takes_thought if has_thought else native.takes_text):
        return [message]
    others = {name: value for name, value in message.items() if name != "content"}
    return [{"role": message["role"], "content": text}, others]


def _one_by_one(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages with each of several calls in one of its own, before its result."""
    found: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for index, call in enumerate(calls):
            own = message if index == 0 else {"role": message["role"]}
            found.append({**own, "tool_calls": [call]})
            ids = [result.get("tool_call_id") for result in results]
            id = call.get("id")
            found += [results.pop(ids.index(id) if id in ids else 0)] if results else []
        found += results
    return found


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
    calls = [_with_object(call, native) for call in calls]
    if not native.shows_calls:
        return _spelled({**message, "tool_calls": calls}, native.form)
    if not native.takes_mappings:
        calls = [_as_text(call) for call in calls]
    fitting = {**message, "tool_calls": [{"type": "function", **call} for call in calls]}
    content = message.get("content")
    if not content and content not in native.silences:
        fitting |= {"content": native.silences[0]}
    return fitting


def _with_object(call: Mapping[str, Any], native: NativeTools) -> Mapping[str, Any]:
    """The call with arguments, and where they are written one by one, with an object of them: a
    text that means none, such as that of a call that was cut off, becomes an argument."""
    arguments = call["function"].get("arguments")
    if arguments is None:
        arguments = {}
    elif native.form.keyed is not None and not _is_object(arguments):
        arguments = {"arguments": arguments}
    else:
        return call
    return with_call_arguments(call, arguments)


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(meant_arguments(arguments), Mapping)
    except ValueError:
        return False


def _as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        return call
    return with_call_arguments(call, json.dumps(arguments, ensure_ascii=False))


class _Ids:
    """Gives calls and results ids that the template takes. Those that it takes stay as they are;
    others become the same ones each time."""

    def __init__(self, style: IdStyle) -> None:
        self._style = style
        self._given: dict[str, str] = {}  # what became of them
        self._open: list[str] = []  # calls without a result
        self._count = 0

    def fitted(self, message: Message) -> Message:
        if message.get("tool_calls"):
            return {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        return self._result(message) if message["role"] == "tool" else message

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        given = call.get("id")
        made = self._made(given, call["function"]["name"])
        self._count += 1
        if isinstance(given, str):
            self._given[given] = made
        self._open.append(made)
        return {**call, "id": made}

    def _made(self, given: object, name: str) -> str:
        if isinstance(given, str) and self._style.takes(given):
            return given
        if self._style is IdStyle.NAMED:
            return self._style.made(name, self._count)
        known = given if isinstance(given, str) else str(self._count)
        return hashlib.sha256(known.encode()).hexdigest()[:9]

    def _result(self, message: Message) -> Message:
        """A result without an id is that of the first call that has none."""
        given = message.get("tool_call_id")
        made = self._given.get(given) if isinstance(given, str) else None
        if made is None:
            made = self._open[0] if self._open else self._made(given, str(message.get("name", "")))
        if made in self._open:
            self._open.remove(made)
        return {**message, "tool_call_id": made}
