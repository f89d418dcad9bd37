"""Fits messages and tools to what a chat template takes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from edge_spec.errors import UsageError
from edge_spec.text.plain_messages import THOUGHTS, Message, Tools
from edge_spec.text.template_traits import TemplateTraits
from edge_spec.text.tools.call_ids import with_ids
from edge_spec.text.tools.call_probes import with_tools
from edge_spec.text.tools.detection import NativeTools
from edge_spec.text.tools.forms import GENERIC, described
from edge_spec.text.tools.protocol import ToolForm

_GAP = "\n\n"  # between the contents of messages that become one


def fitted(
    messages: Sequence[Message], tools: Tools, traits: TemplateTraits
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render. What the template takes stays as it is, so that the
    prompt is the one that transformers renders.

    Tools that it does not know are described in a message of the system, calls and their results
    become text; messages in a row of one speaker become one where speakers have to take turns;
    messages of the system that it refuses or loses join the first one, or the user's next. Raises
    UsageError for tools and calls that are not as OpenAI has them.
    """
    if tools or any(each["role"] == "tool" or each.get("tool_calls") for each in messages):
        messages, native = with_arguments(messages, traits), traits.native_tools
        if native is not None:
            messages = [part for each in messages for part in _apart(each, native)]
            messages = messages if native.takes_several else _one_by_one(messages)
            messages = with_ids([_native(each, native) for each in messages], native.ids)
            if not native.shows_tools:
                _check("tools", tools)
                given = _given if native.tools_in_system else _described
                messages, tools = given(messages, tools, native.form), ()
        elif tools or not traits.takes(messages):
            _check("tools", tools)
            spelled = [_spelled(each, GENERIC) for each in messages]
            messages, tools = _described(spelled, tools, GENERIC), ()
    return _arranged(messages, traits), tools


def with_arguments(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    """Returns the messages with the arguments of calls as an object, unless the template takes the
    text that they are. Raises UsageError for calls that are not as OpenAI has them."""
    for message in messages:
        _check("a message's tool_calls", message.get("tool_calls") or ())
    if not any(message.get("tool_calls") for message in messages) or (
        traits.native_tools is not None and traits.native_tools.takes_texts
    ):
        return messages
    return [
        {**each, "tool_calls": list(map(_as_mapping, each["tool_calls"]))}
        if each.get("tool_calls")
        else each
        for each in messages
    ]


def _check(where: str, functions: Any) -> None:
    try:
        is_named = all(isinstance(each["function"]["name"], str) for each in functions)
    except (LookupError, TypeError):
        is_named = False
    if not is_named:
        raise UsageError(
            f"{where} has an entry without a function's name",
            remedy='An entry is {"type": "function", "function": {"name": "...", ...}}.',
        )


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


def _described(messages: Sequence[Message], tools: Tools, form: ToolForm) -> Sequence[Message]:
    if not tools:
        return messages
    return _with_system({"role": "system", "content": described(tools, form)}, messages)


def _given(messages: Sequence[Message], tools: Tools, form: ToolForm) -> Sequence[Message]:
    """Gives tools with the message of the system."""
    if not tools:
        return messages
    return _with_system(with_tools({"role": "system", "content": ""}, tools), messages)


def _with_system(system: Message, messages: Sequence[Message]) -> Sequence[Message]:
    if messages and messages[0]["role"] == "system":
        return [_joined(messages[0], system), *messages[1:]]
    return [system, *messages]


def _native(message: Message, native: NativeTools) -> Message:
    calls = message.get("tool_calls")
    if message["role"] == "tool" and not native.shows_results:
        return _spelled(message, native.form)
    if not calls:
        return message
    if not native.shows_calls:
        return _spelled(message, native.form)
    if not native.takes_mappings:
        calls = [_as_text(call) for call in calls]
    fitting = {**message, "tool_calls": [{"type": "function", **call} for call in calls]}
    content = message.get("content")
    if not content and content not in native.silences:
        fitting |= {"content": native.silences[0]}
    return fitting


def _as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        return call
    return _with_arguments(call, json.dumps(arguments, ensure_ascii=False))


def _as_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call with the arguments that its text means, if it is one of an object."""
    arguments = call["function"].get("arguments", {})
    try:
        meant = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return call
    return _with_arguments(call, meant) if isinstance(meant, dict) else call


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> Mapping[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _arranged(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    systems = [index for index, each in enumerate(messages) if each["role"] == "system"]
    is_usual = not systems or (systems == [0] and traits.takes_system)
    if (is_usual and not any(_in_a_row(messages))) or traits.takes(messages):
        return messages
    arranged = _turns(messages)
    if systems and not traits.takes(arranged):
        arranged = _systems(messages, traits)
        if not traits.takes(arranged):
            arranged = _turns(arranged)
    return arranged


def _systems(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    """Joins messages of the system at the beginning, and makes others the user's."""
    num_first = 0
    if traits.takes_system:
        others = (n for n, each in enumerate(messages) if each["role"] != "system")
        num_first = next(others, len(messages))
    rest = [
        {**each, "role": "user"} if each["role"] == "system" else each
        for each in messages[num_first:]
    ]
    return [reduce(_joined, messages[:num_first]), *rest] if num_first else rest


def _in_a_row(messages: Sequence[Message]) -> list[bool]:
    """Says of each message but the first whether user or assistant goes on speaking there."""
    return [
        before["role"] == after["role"] and after["role"] in ("user", "assistant")
        for before, after in pairwise(messages)
    ]


def _turns(messages: Sequence[Message]) -> Sequence[Message]:
    turns = [messages[0]]
    for message, goes_on in zip(messages[1:], _in_a_row(messages), strict=True):
        turns = [*turns[:-1], _joined(turns[-1], message)] if goes_on else [*turns, message]
    return turns


def _joined(message: Message, other: Message) -> Message:
    contents = [each["content"] for each in (message, other) if each.get("content")]
    joined: dict[str, Any] = {**message, **other, "content": _GAP.join(contents)}
    calls = [*(message.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    return {**joined, "tool_calls": calls} if calls else joined
