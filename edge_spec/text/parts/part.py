"""Parts of an answer: what the model thought, what it says, and the calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PartKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True)
class CallHead:
    """What is known of a call before its arguments. index: its place among the answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Part:
    """The next piece of a part.

    text: of a thought, of the text, or of a call's arguments, which are JSON. It may be empty: then
    it says that what was read until now, such as a tag, belongs to this kind. call: goes with the
    first piece of each call; the pieces after it belong to the same one.
    """

    kind: PartKind
    text: str
    call: CallHead | None = None


class PartReader(Protocol):
    """Tells the parts of one answer apart while it is written. What it tells does not depend on
    the pieces that the answer comes in."""

    @property
    def is_cut(self) -> bool:
        """Says whether the answer has ended within a call."""

    def push(self, markup: str) -> list[Part]:
        """Returns what is known with this piece of the answer, in which special tokens are written
        out. Pieces of a text or of a thought are slices of the answer as it was pushed."""

    def finish(self) -> list[Part]:
        """Returns what was held back of the answer, which has ended."""


class PlainReader:
    """Reads an answer that is nothing but text."""

    is_cut = False

    def push(self, markup: str) -> list[Part]:
        return [Part(PartKind.TEXT, markup)] if markup else []

    def finish(self) -> list[Part]:
        return []
