"""Gives calls in a conversation ids that its chat template takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec.text.plain_messages import Message
from edge_spec.text.tools.part_list import IdStyle


def with_ids(messages: Sequence[Message], style: IdStyle) -> Sequence[Message]:
    """Returns the messages, and results that name the calls that they are of. Ids that the template
    takes stay as they are; others become the same ones each time."""
    if style is IdStyle.ANY:
        return messages
    ids = _Ids(style)
    return [ids.fitted(message) for message in messages]


class _Ids:
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
