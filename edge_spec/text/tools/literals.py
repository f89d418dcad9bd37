"""Finds texts in an answer that is not complete, however the model spaces them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from edge_spec.text.stop_cutter import overlap

TAG_PATTERN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class Slot(Enum):
    """What differs from call to call."""

    NAME = r"[a-zA-Z0-9_.-]+"
    ARGUMENTS = "arguments"
    ID = r"[a-zA-Z0-9_.:/-]+"
    INDEX = r"[0-9]+"


Piece = str | Slot


class Partial(Enum):
    PARTIAL = "partial"


PARTIAL: Final = Partial.PARTIAL  # it may still become what is looked for


@dataclass(frozen=True)
class Found:
    end: int
    values: Mapping[Slot, str]


def matched(pieces: Sequence[Piece], text: str) -> Found | Literal[Partial.PARTIAL] | None:
    """Says whether `text` begins with these pieces, however it is spaced; arguments end them, and
    are not read."""
    place = 0
    values: dict[Slot, str] = {}
    for piece in pieces:
        if isinstance(piece, str):
            end = _after(piece, text, place)
        elif piece is Slot.ARGUMENTS:
            break
        else:
            place += _num_spaces(text, place)
            value = re.compile(piece.value).match(text, place)
            values[piece] = value.group() if value else ""
            end = value.end() if value else None if place < len(text) else PARTIAL
            end = PARTIAL if end == len(text) else end
        if end is None or end is PARTIAL:
            return end
        place = end
    return Found(place, values)


def _after(literal: str, text: str, place: int) -> int | Literal[Partial.PARTIAL] | None:
    for character in literal:
        if character.isspace():
            continue
        place += _num_spaces(text, place)
        if place == len(text):
            return PARTIAL
        if text[place] != character:
            return None
        place += 1
    return place


def _num_spaces(text: str, place: int) -> int:
    end = place
    while end < len(text) and text[end].isspace():
        end += 1
    return end - place


def first_of(markers: Sequence[str], text: str) -> tuple[int, str]:
    """Returns where the first of `markers` is in the text, and which; else where one may begin that
    the text has not yet in full, and ""."""
    begun = len(text) - max((overlap(text, each) for each in markers), default=0)
    found = [(place, -len(each), each) for each in markers if (place := text.find(each)) >= 0]
    place, _, marker = min(found, default=(begun, 0, ""))
    return (place, marker) if place <= begun else (begun, "")


def tags_of(text: str) -> list[str]:
    return TAG_PATTERN.findall(text)


def shared_end(text: str, other: str) -> str:
    """Returns the longest end of both that begins with a tag; "" without one."""
    starts = (tag.start() for tag in TAG_PATTERN.finditer(text))
    return next((text[start:] for start in starts if other.endswith(text[start:])), "")


def num_shared(text: str, other: str) -> int:
    """Returns how many characters both begin with."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))
