"""Puts the results of tool calls in the order of the calls."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_spec.errors import UsageError
from edge_spec.text.plain_messages import Message

NO_RESULT = "no result"  # stands for one that is missing


def with_ordered_results(messages: Iterable[Message]) -> list[Message]:
    """Return plain messages in which each call has one result, in the order of the calls.

    A result belongs to the newest call with its id; one without an id to the next open call of its
    name, or else to the next open one. Several results of one call are joined. `NO_RESULT` stands
    for a missing one, unless the calls end the conversation. Raises UsageError for an id that no
    call before it has.
    """
    turns: list[Message | _Calls] = []
    by_id: dict[str, deque[list[Message]]] = {}
    last: _Calls | None = None
    for message in messages:
        calls, id = message.get("tool_calls"), _text(message, "tool_call_id")
        if isinstance(calls, list | tuple) and calls:
            last = _Calls(message, calls)
            turns.append(last)
            by_id |= last.by_id
        elif message["role"] != "tool" or (last is None and id is None):
            turns.append(message)
        elif id is not None and id in by_id:
            places = by_id[id]
            (places.popleft() if len(places) > 1 else places[0]).append(message)
        elif last is None or (id is not None and last.has_ids):
            raise UsageError(
                f"a tool's result has the id {reprlib.repr(id)}, which no call before it has",
                remedy="Send the message with that call, too, or leave the result out.",
            )
        else:
            last.others.append(message)
    ordered: list[Message] = []
    for turn in turns:
        if isinstance(turn, _Calls):
            ordered += [turn.message, *turn.results(is_last=turn is turns[-1])]
        else:
            ordered.append(turn)
    return ordered


class _Calls:
    """A message with calls, and what came back of each."""

    def __init__(self, message: Message, calls: Sequence[Any]) -> None:
        self.message = message
        self.others: list[Message] = []  # results that do not say by an id of which call they are
        self.by_id: dict[str, deque[list[Message]]] = {}
        self._calls = calls
        self._found: list[list[Message]] = [[] for _ in calls]
        ids = [_text(call, "id") for call in calls]
        self.has_ids = None not in ids
        for id, found in zip(ids, self._found, strict=True):
            if id is not None:
                self.by_id.setdefault(id, deque()).append(found)

    def results(self, *, is_last: bool) -> list[Message]:
        if is_last and not self.others and not any(self._found):
            return []
        names = [_function_name(call) for call in self._calls]
        rest = deque[Message]()
        for result in self.others:
            own = (
                found
                for name, found in zip(names, self._found, strict=True)
                if not found and name == _text(result, "name")
            )
            next(own, rest).append(result)
        for found in self._found:
            if not found and rest:
                found.append(rest.popleft())
        results = map(_result, self._calls, self._found)
        return [*results, *rest]


def _result(call: Any, found: Sequence[Message]) -> Message:
    """Return the result of a call, of which any number came."""
    if not found:
        given = {"tool_call_id": _text(call, "id"), "name": _function_name(call)}
        named = {name: value for name, value in given.items() if value is not None}
        return {"role": "tool", "content": NO_RESULT, **named}
    contents = dict.fromkeys(result["content"] for result in found)
    return found[0] if len(contents) == 1 else {**found[0], "content": "\n".join(contents)}


def _function_name(call: Any) -> str | None:
    return _text(call.get("function"), "name") if isinstance(call, Mapping) else None


def _text(value: Any, name: str) -> str | None:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else None
