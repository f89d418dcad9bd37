"""Makes of messages as people and clients give them those that chat templates read, and small ones
that tell what a template makes of larger ones."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_spec.errors import UsageError

# "role" and "content", which is text or a list of parts of text. Anything else, such as
# "tool_calls", goes to the template as it is.
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {...}}, as OpenAI has them
ROLES = ("system", "user", "assistant", "tool")
# What a model thought before it answered, by the names that servers give it; templates read the
# first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
NO_RESULT = "no result"  # stands for one that is missing
_GAP = "\n\n"  # between the contents of messages that become one
# Words that no template has of its own.
USER, ASSISTANT = "probe-user", "probe-assistant"
LISTED, CALLED = "probe_listed", "probe_called"
RESULT, ARGUMENTS = "probe-result", {"probe_argument": "probe-value"}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": LISTED,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {"probe_argument": {"type": "string", "description": "A probe."}},
                "required": ["probe_argument"],
            },
        },
    }
]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages whose content is one text. Made again of what it returned, they stay as they
    are.

    As in transformers, what is None is left out, and thoughts are there by each name that templates
    read. An answer or a result of a tool without content has an empty one. Raises UsageError for a
    message that is malformed.
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
    """Return plain messages in which each call has one result, in the order of the calls.

    A result belongs to the call with its id, of the message before it; one without an id to the
    next open call, of its name if it has one. Several results of one call are joined. `NO_RESULT`
    stands for a missing one, unless the calls end the conversation. Raises UsageError for an id
    that no call has.
    """
    ordered: list[Message] = []
    calls: Sequence[Any] = ()  # of the last message with some
    results: list[Message] = []
    after: list[Message] = []  # what follows that message, beside results
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
    # Those that say of which call they are go before others.
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
    """Return the result of a call, of which any number came."""
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
    """Returns what a call's arguments mean, which may be JSON text. Raises ValueError for text that
    is none."""
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def with_call_arguments(call: Mapping[str, Any], arguments: Any) -> Mapping[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def joined(message: Message, other: Message) -> Message:
    """Makes one message of two of a speaker."""
    contents = [each["content"] for each in (message, other) if each.get("content")]
    joined: dict[str, Any] = {**message, **other, "content": _GAP.join(contents)}
    calls = [*(message.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    return {**joined, "tool_calls": calls} if calls else joined


def probe_of(message: Message, place: int) -> Message:
    """The message with words in it that no template has of its own."""
    calls = message.get("tool_calls")
    is_silent = calls and not message.get("content")
    probe = {**message} if is_silent else {**message, "content": f"probe-content-{place}."}
    if calls:
        probe["tool_calls"] = [_probed(call, place, index) for index, call in enumerate(calls)]
    return probe


def _probed(call: Mapping[str, Any], place: int, index: int) -> Mapping[str, Any]:
    is_text = isinstance(call["function"].get("arguments"), str)
    arguments = json.dumps(ARGUMENTS) if is_text else ARGUMENTS
    function = {"name": f"probe_call_{place}_{index}_", "arguments": arguments}
    return {**call, "function": function}


def words_of(message: Message) -> list[str]:
    """Returns what has to be shown of a probe. Many templates leave out what is said beside
    calls."""
    calls = message.get("tool_calls")
    return [call["function"]["name"] for call in calls] if calls else [message["content"]]


def probe_message(role: str, content: str) -> Message:
    named = {"name": CALLED, "tool_call_id": "probe0001"} if role == "tool" else {}
    return {"role": role, "content": content, **named}


def probe_call(content: str, ids: Sequence[str]) -> Message:
    function = {"name": CALLED, "arguments": ARGUMENTS}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}
