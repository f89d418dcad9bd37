"""Normalize messages from users and clients for chat templates."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_spec.errors import UsageError

# "role" and "content" (text or a list of text parts). Other keys, such as "tool_calls", are passed
# to the template unchanged.
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {...}}, as in OpenAI's API
ROLES = ("system", "user", "assistant", "tool")
# Servers' names for the thought before an answer; templates read the first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
NO_RESULT = "no result"  # replaces a missing one
_GAP = "\n\n"  # between the contents of merged messages
PROBE_ARGUMENTS = {"probe_argument": "probe-value"}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose content is one text. Idempotent.

    As in transformers, None is dropped, and thoughts appear under each name that templates read.
    Answers and tool results without content get "". Raises UsageError.
    """
    given: Any = messages
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise UsageError(
            f"the messages are {reprlib.repr(given)}",
            remedy='They are a text, or a list of {"role": "user", "content": "..."}.',
        )
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(
            f"a message is a {type(message).__name__}",
            remedy='A message is a mapping: {"role": "user", "content": "..."}.',
        )
    plain = {name: value for name, value in message.items() if value is not None}
    role = plain.get("role")
    if role == "developer":
        role = plain["role"] = "system"
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = "".join(map(_text, plain["content"]))
    elif role in ("assistant", "tool"):
        plain.setdefault("content", "")
    content = plain.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise UsageError(
            f"a message has the role {role!r} and content of {type(content).__name__}",
            remedy=f"Roles are {', '.join(ROLES)}; content is text.",
        )
    thoughts = next((plain[name] for name in THOUGHTS if name in plain), None)
    if thoughts is None:
        return plain
    return {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def _text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise UsageError(
            f"a message has a part of the type {str(kind)[:40]}",
            remedy='The model reads text: send parts {"type": "text", "text": "..."}.',
        )
    return text


def with_ordered_results(messages: Iterable[Message]) -> list[Message]:
    """Return messages with one result per call, in the order of the calls.

    A result belongs to the preceding message's call of its id; without an id, to the next open call
    (of its name, if any). Several results are joined; `NO_RESULT` replaces a missing one, unless
    the calls end the conversation. Raises UsageError for an unknown id.
    """
    ordered: list[Message] = []
    calls: Sequence[Any] = ()  # of the last message with calls
    results: list[Message] = []
    after: list[Message] = []  # what else follows that message
    for message in messages:
        given = message.get("tool_calls")
        if message["role"] == "tool" and (calls or "tool_call_id" in message):
            results.append(message)
        elif isinstance(given, list | tuple) and given:
            ordered += [*_in_order(calls, results), *after, message]
            calls, results, after = given, [], []
        else:
            after.append(message)
    is_open = not (results or after)
    return [*ordered, *(() if is_open else _in_order(calls, results)), *after]


def _in_order(calls: Sequence[Any], results: Sequence[Message]) -> list[Message]:
    found: list[list[Message]] = [[] for _ in calls]
    ids = [_entry(call, "id") for call in calls]
    names = [_entry(call, "function", "name") for call in calls]
    # Results that name their call come first.
    for result in sorted(
        results, key=lambda each: ("tool_call_id" not in each, "name" not in each)
    ):
        id, name = result.get("tool_call_id"), result.get("name")
        places = [n for n, each in enumerate(ids) if id is not None and each == id]
        if not places and id is not None and None not in ids:
            raise UsageError(
                f"a tool's result has the id {reprlib.repr(id)}, which no call before it has",
                remedy="Send the message with that call, too, or leave the result out.",
            )
        if not places:
            own = [n for n, each in enumerate(names) if each == name and not found[n]]
            places = [*own, *(n for n in range(len(calls)) if not found[n]), len(calls) - 1]
        found[next((n for n in places if not found[n]), places[0])].append(result)
    return list(map(_result, calls, found))


def _result(call: Any, found: Sequence[Message]) -> Message:
    if not found:
        given = {"tool_call_id": _entry(call, "id"), "name": _entry(call, "function", "name")}
        named = {name: value for name, value in given.items() if value is not None}
        return {"role": "tool", "content": NO_RESULT, **named}
    contents = dict.fromkeys(result["content"] for result in found)
    return found[0] if len(contents) == 1 else {**found[0], "content": "\n".join(contents)}


def _entry(value: Any, *names: str) -> str | None:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


def meant_arguments(arguments: Any) -> Any:
    """Raises ValueError for text that is not JSON."""
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def with_call_arguments(call: Mapping[str, Any], arguments: Any) -> Mapping[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def joined(message: Message, other: Message) -> Message:
    """Merge two messages of one speaker."""
    contents = [each["content"] for each in (message, other) if each.get("content")]
    joined: dict[str, Any] = {**message, **other, "content": _GAP.join(contents)}
    calls = [*(message.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    return {**joined, "tool_calls": calls} if calls else joined
