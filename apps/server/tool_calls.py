"""Calls of tools in an answer, as Hermes and the models that follow it write them:

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass
class ToolCallReader:
    """Splits an answer, piece by piece, into text and calls.

    is_call: the whole answer is one call without its tags. What looks like a call and is none
    stays text, so nothing that the model wrote is lost.
    """

    is_call: bool = False
    num_calls: int = 0
    _held: str = ""
    _gap: str | None = None  # white space since the last call; None: there is other text after it
    _inside: bool = field(init=False)

    def __post_init__(self) -> None:
        self._inside = self.is_call

    def push(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that are complete with this piece."""
        self._held += piece
        text, calls = "", []
        while True:
            tag = _CLOSE if self._inside else _OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            self._held = after
            if not self._inside:
                text += self._shown(before)
                self._inside = True
                continue
            self._inside = False
            call = self._call(before)
            if call is None:
                text += self._shown(f"{_OPEN}{before}{_CLOSE}")
            else:
                calls.append(call)
        if not self._inside:
            kept = len(self._held) - _overlap(self._held, _OPEN)
            text += self._shown(self._held[:kept])
            self._held = self._held[kept:]
        return text, calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back; a call whose end is missing counts where it is complete."""
        held, self._held = self._held, ""
        if self._inside:
            call = self._call(held)
            if call is not None:
                return "", [call]
            held = held if self.is_call else _OPEN + held
        return self._shown(held), []

    def _shown(self, text: str) -> str:
        """Leaves out what is only white space between calls and after the last one, however the
        text comes in pieces."""
        if self._gap is None:
            return text
        text = self._gap + text
        self._gap = None if text.strip() else text
        return "" if self._gap is not None else text

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self.num_calls += 1
        self._gap = ""
        return {
            "index": self.num_calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments},
        }


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
