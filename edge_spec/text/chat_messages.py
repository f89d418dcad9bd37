"""Fits a conversation to what a model's chat template takes, whatever it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from edge_spec.errors import UsageError
from edge_spec.text.chat_template import Message, Tools
from edge_spec.text.template_traits import NativeTools, TemplateTraits
from edge_spec.text.tool_form import ToolForm

_GAP = "\n\n"  # between the contents of messages that become one


def fitted(
    messages: Sequence[Message], tools: Tools, traits: TemplateTraits
) -> tuple[Sequence[Message], Tools]:
    """Returns the messages and tools to render. What the template takes stays as it is.

    Tools that it does not know are described in a message of the system, calls and their results
    become text; messages of the system that it refuses or loses join the first one, or the user's
    next; messages in a row of one speaker become one where speakers have to take turns. Raises
    UsageError for tools and calls that are not as OpenAI has them.
    """
    if tools or any(each["role"] == "tool" or each.get("tool_calls") for each in messages):
        for message in messages:
            _check("a message's tool_calls", message.get("tool_calls") or ())
        native = traits.native_tools
        if native is None:
            _check("tools", tools)
            form = ToolForm()
            messages, tools = _described([_spelled(each, form) for each in messages], tools), ()
        else:
            messages = [_native(each, native) for each in messages]
    messages = _systems(messages, traits)
    return _turns(messages, traits), tools


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


def _described(messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    if not tools:
        return messages
    described: Message = {"role": "system", "content": ToolForm().described(tools)}
    if messages and messages[0]["role"] == "system":
        return [_joined(messages[0], described), *messages[1:]]
    return [described, *messages]


def _native(message: Message, native: NativeTools) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if len(calls) > 1 and not native.takes_several:
        return _spelled(message, native.form)
    calls = [{**call, "function": _arguments(call["function"], native.is_text)} for call in calls]
    return {**message, "content": message.get("content") or native.silence, "tool_calls": calls}


def _arguments(function: Mapping[str, Any], is_text: bool) -> Mapping[str, Any]:
    arguments = function.get("arguments", {})
    if is_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _systems(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    systems = [index for index, each in enumerate(messages) if each["role"] == "system"]
    if not systems or (traits.takes_system and (systems == [0] or traits.takes_more_systems)):
        return messages
    num_first = 0
    if traits.takes_system:
        others = (n for n, each in enumerate(messages) if each["role"] != "system")
        num_first = next(others, len(messages))
    rest = [
        {**each, "role": "user"} if each["role"] == "system" else each
        for each in messages[num_first:]
    ]
    return [reduce(_joined, messages[:num_first]), *rest] if num_first else rest


def _turns(messages: Sequence[Message], traits: TemplateTraits) -> Sequence[Message]:
    in_a_row = [
        before["role"] == after["role"] and after["role"] in ("user", "assistant")
        for before, after in pairwise(messages)
    ]
    if not any(in_a_row) or traits.takes_repeats:
        return messages
    turns = [messages[0]]
    for message, goes_on in zip(messages[1:], in_a_row, strict=True):
        turns = [*turns[:-1], _joined(turns[-1], message)] if goes_on else [*turns, message]
    return turns


def _joined(message: Message, other: Message) -> Message:
    contents = [each["content"] for each in (message, other) if each.get("content")]
    joined: dict[str, Any] = {**message, **other, "content": _GAP.join(contents)}
    calls = [*(message.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    return {**joined, "tool_calls": calls} if calls else joined
