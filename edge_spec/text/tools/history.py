"""Puts calls, their results and tools into a conversation as its chat template wants them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_spec.text.plain_messages import (
    THOUGHTS,
    Message,
    Tools,
    joined,
    meant_arguments,
    with_call_arguments,
)
from edge_spec.text.tools.call_shape import SHORT_ID
from edge_spec.text.tools.detection import NativeTools, ToolForm, with_tools
from edge_spec.text.tools.formats import GENERIC, described

Turn = tuple[Message, Sequence[Message]]  # a message, and the results that follow it


def native_history(
    messages: Sequence[Message], tools: Tools, native: NativeTools
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render with a template that knows calls."""
    turns = [part for each in _turns(messages) for part in _parts(*each, native)]
    if native.form.short_ids:
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


def spelled_history(messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    """Returns messages of text alone, and before them a description of the tools."""
    spelled = [_spelled(each, GENERIC) for each in messages]
    if not tools:
        return spelled
    return _with_system({"role": "system", "content": described(tools)}, spelled)


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
    has_thought = any(message.get(name) for name in THOUGHTS)
    if text and not (native.takes_thought if has_thought else native.takes_text):
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
    fitting = {**message, "tool_calls": [{"type": "function", **call} for call in calls]}
    content = message.get("content")
    if not content and content not in native.silences:
        fitting |= {"content": native.silences[0]}
    return fitting


def _native_call(call: Mapping[str, Any], native: NativeTools) -> Mapping[str, Any]:
    """The call with arguments of a kind that the template takes, and where they are written one by
    one, with an object of them: a text that means none, such as that of a call that was cut off,
    becomes an argument."""
    arguments = call["function"].get("arguments")
    if arguments is None:
        arguments = {}
    elif native.form.keyed is not None and not _is_object(arguments):
        arguments = {"arguments": arguments}
    if not (native.takes_mappings or isinstance(arguments, str)):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return with_call_arguments(call, arguments)


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(meant_arguments(arguments), Mapping)
    except ValueError:
        return False


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
