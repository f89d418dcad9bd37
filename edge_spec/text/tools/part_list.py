"""Collects the parts that a reader of calls finds in an answer."""

from __future__ import annotations

import re
import secrets
import string
from enum import Enum

from edge_spec.text.parts.part import CallHead, Part, PartKind

_LETTERS = string.ascii_letters + string.digits


class IdStyle(Enum):
    """How templates want the ids of calls."""

    ANY = "any"
    NINE = "nine"  # nine letters and digits
    NAMED = "named"  # functions.NAME:INDEX

    def takes(self, id: str) -> bool:
        return self is IdStyle.ANY or re.fullmatch(_PATTERNS[self], id) is not None

    def made(self, name: str, index: int) -> str:
        """Returns an id for a call that has none."""
        if self is IdStyle.NAMED:
            return f"functions.{name}:{index}"
        if self is IdStyle.NINE:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_PATTERNS = {IdStyle.NINE: r"[a-zA-Z0-9]{9}", IdStyle.NAMED: r"functions\.[a-zA-Z0-9_.-]+:\d+"}


class PartList:
    """White space between calls and after the last one is left out, however it comes in pieces."""

    def __init__(self, ids: IdStyle = IdStyle.ANY) -> None:
        self.num_calls = 0
        self._id_style = ids
        self._ids: set[str] = set()
        self._gap: str | None = None  # white space since the last call; None: text came after it
        self._parts: list[Part] = []

    def add_text(self, text: str) -> None:
        if self._gap is not None:
            text = self._gap + text
            self._gap = None if text.strip() else text
        if self._gap is None and text:
            self._add(Part(PartKind.TEXT, text))

    def begin_call(self, name: str, id: str | None = None) -> None:
        """id: as the model wrote it. One that an earlier call of the answer has is replaced."""
        if id is None or id in self._ids or not self._id_style.takes(id):
            is_twice = id in self._ids and self._id_style is IdStyle.NAMED
            id = (IdStyle.ANY if is_twice else self._id_style).made(name, self.num_calls)
        self._ids.add(id)
        self._gap = ""
        self._parts.append(Part(PartKind.CALL, "", CallHead(self.num_calls, id, name)))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self._add(Part(PartKind.CALL, text))

    def taken(self) -> list[Part]:
        """Returns what has come since it was asked last; of each call, at most one part."""
        taken, self._parts = self._parts, []
        return taken

    def _add(self, part: Part) -> None:
        if self._parts and self._parts[-1].kind is part.kind:
            last = self._parts.pop()
            part = Part(part.kind, last.text + part.text, last.call)
        self._parts.append(part)
