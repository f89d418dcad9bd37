"""Calls of tools as OpenAI's streams have them: index, id and name first, then the arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edge_spec.text.parts.part import Part, PartKind
from edge_spec.text.tools.protocol import ToolForm


class ToolCallReader:
    """Splits an answer into text and calls."""

    def __init__(self, form: ToolForm) -> None:
        self.num_calls = 0
        self._reader = form.reader()

    @property
    def is_cut(self) -> bool:
        """Says whether the answer has ended within a call."""
        return self._reader.is_cut

    def push(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text and the pieces of calls that are known with this piece of the answer, at
        most one of each call."""
        return self._told(self._reader.push(piece))

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns what was held back of the answer, which has ended."""
        return self._told(self._reader.finish())

    def _told(self, parts: Iterable[Part]) -> tuple[str, list[dict[str, Any]]]:
        text, calls = "", []
        for part in parts:
            if part.kind is PartKind.TEXT:
                text += part.text
            elif part.call is not None:
                self.num_calls += 1
                function = {"name": part.call.name, "arguments": part.text}
                head = {"index": part.call.index, "id": part.call.id, "type": "function"}
                calls.append({**head, "function": function})
            elif part.kind is PartKind.CALL:
                calls.append({"index": self.num_calls - 1, "function": {"arguments": part.text}})
        return text, calls


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
