"""Reads calls of tools out of an answer, piece by piece as OpenAI's streams have them: index, id
and name first, then the arguments as they come."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edge_spec.text.template_traits import END_TAG, TAG, ToolForm


@dataclass
class ToolCallReader:
    """Splits an answer into text and calls of `form`. What looks like a call and has no name stays
    text, so nothing that the model wrote is lost."""

    form: ToolForm = field(default_factory=ToolForm)
    num_calls: int = 0
    is_cut: bool = False  # the answer has ended within a call

    def __post_init__(self) -> None:
        is_tagged = bool(self.form.opening)
        name = r'\{\s*"name"\s*:\s*"([a-zA-Z0-9_.-]+)"'
        tag = rf"{TAG}\s*" if is_tagged else ""
        self._head = re.compile(rf'{tag}{name}\s*,\s*"{self.form.arguments}"\s*:\s*(?=\{{)')
        self._read: Callable[[], bool] = self._read_text if is_tagged else self._read_first
        self._held = ""
        self._gap: str | None = None  # white space since the last call; None: text came after it
        self._object = _ObjectEnd()
        self._text = ""
        self._calls: list[dict[str, Any]] = []

    def push(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text and the pieces of calls that are known with this piece of the answer, at
        most one of each call."""
        self._held += piece
        while self._read():
            pass
        return self._told()

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns what was held back of the answer, which has ended."""
        is_head = self._read == self._read_head
        self.is_cut = is_head or self._read == self._read_arguments
        if self._read != self._read_end and not (is_head and self.num_calls):
            self._show(self._held)
        self._held = ""
        return self._told()

    def _told(self) -> tuple[str, list[dict[str, Any]]]:
        told = self._text, self._calls
        self._text, self._calls = "", []
        return told

    # What comes next. Each reads of `_held` what it can, and says whether another one goes on.

    def _read_first(self) -> bool:
        """The whole answer is a call, or none of it."""
        marker = self.form.marker
        if marker.startswith(self._held):
            return False
        self._read = self._read_head if self._held.startswith(marker) else self._read_rest
        return True

    def _read_text(self) -> bool:
        before, found, after = self._held.partition(TAG)
        if found:
            self._show(before)
            self._held = found + after
            self._read = self._read_head
            return True
        kept = len(self._held) - _overlap(self._held, TAG)
        self._show(self._held[:kept])
        self._held = self._held[kept:]
        return False

    def _read_head(self) -> bool:
        head = self._head.match(self._held)
        if head is not None:
            self._held = self._held[head.end() :]
            self._begin(head[1])
            return True
        before, found, after = self._held.partition(END_TAG)
        if found and self.form.opening:
            self._show(before + found)
            self._held = after
            self._read = self._read_text
            return True
        return False

    def _read_arguments(self) -> bool:
        length = self._object.find(self._held)
        self._add(self._held[:length])
        self._held = self._held[length:]
        if self._object.is_complete:
            self._read = self._read_end
        return self._object.is_complete

    def _read_end(self) -> bool:
        is_tagged = bool(self.form.opening)
        _, found, after = self._held.partition(END_TAG if is_tagged else "}")
        if found:
            self._held = after
            self._read = self._read_text if is_tagged else self._read_rest
        return bool(found)

    def _read_rest(self) -> bool:
        self._show(self._held)
        self._held = ""
        return False

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self._gap = ""
        self._object = _ObjectEnd()
        self._read = self._read_arguments
        function = {"name": name, "arguments": ""}
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self._calls.append({"index": self.num_calls - 1, **call})

    def _add(self, arguments: str) -> None:
        index = self.num_calls - 1
        if not self._calls and arguments:
            self._calls.append({"index": index, "function": {"arguments": ""}})
        if arguments:
            self._calls[-1]["function"]["arguments"] += arguments

    def _show(self, text: str) -> None:
        """Leaves out what is only white space between calls and after the last one, however the
        text comes in pieces."""
        if self._gap is not None:
            text = self._gap + text
            self._gap = None if text.strip() else text
        if self._gap is None:
            self._text += text


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, piece: str) -> int:
        """Returns how many characters of `piece` belong to the object."""
        for place, character in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_complete = True
                    return place + 1
        return len(piece)


def joined_calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns whole calls, as an answer that is no stream has them."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if "id" in piece:
            function = dict(piece["function"])
            calls.append({"id": piece["id"], "type": piece["type"], "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
