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
from edge_spec.text.tools.call_shape import IdStyle
from edge_spec.text.tools.detection import NativeTools, ToolForm, with_tools
from edge_spec.text.tools.formats import GENERIC, described


def native_history(
    messages: Sequence[Message], tools: Tools, native: NativeTools
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render with a template that knows calls."""
    messages = [part for each in messages for part in _apart(each, native)]
    messages = messages if native.takes_several else _one_by_one(messages)
    messages = [_native(each, native) for each in messages]
    if native.ids is not IdStyle.ANY:
        messages = _with_ids(messages, native.ids)
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
    """Return the messages with each of several calls in one of its own, before its result. Results
    are in the order of the calls."""
    found: list[Message] = []
    waiting: deque[Message] = deque()  # calls whose result comes next
    for message in messages:
        if message["role"] != "tool":
            found += waiting
            waiting.clear()
        elif waiting:
            found.append(waiting.popleft())
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
        else:
            others = {"role": message["role"]}
            waiting += [{**others, "tool_calls": [call]} for call in calls]
            waiting[0] = {**message, **waiting[0]}
    return [*found, *waiting]


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


def _with_ids(messages: Sequence[Message], style: IdStyle) -> Sequence[Message]:
    """Give calls and results ids that the template takes. Those that it takes stay as they are;
    others become the same ones each time. Results are in the order of the calls."""
    found: list[Message] = []
    waiting: deque[str] = deque()  # ids of calls without a result
    count = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [_made(call, style, count + index) for index, call in enumerate(calls)]
            calls = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": calls}
            waiting = deque(ids)
            count += len(ids)
        elif message["role"] == "tool" and waiting:
            message = {**message, "tool_call_id": waiting.popleft()}
        found.append(message)
    return found


def _made(call: Mapping[str, Any], style: IdStyle, index: int) -> str:
    given = call.get("id")
    if isinstance(given, str) and style.takes(given):
        return given
    if style is IdStyle.NAMED:
        return style.made(call["function"]["name"], index)
    known = given if isinstance(given, str) else str(index)
    return hashlib.sha256(known.encode()).hexdigest()[:9]
