"""The part of an answer that was not read yet, and what it begins with."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from edge_spec.text.parts.part import Part
from edge_spec.text.stop_cutter import overlap

T = TypeVar("T")
Steps = Generator[None, None, T]  # they stop where more of the answer is needed

NAME, ARGUMENTS, ID, INDEX = "$NAME", "$ARGUMENTS", "$ID", "$INDEX"
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_SLOTS = {
    NAME: re.compile(r"[a-zA-Z0-9_.-]{1,128}"),
    ID: re.compile(r"[a-zA-Z0-9_.:/-]{1,128}"),
    INDEX: re.compile(r"[0-9]{1,9}"),
}
_MAX_HEAD = 2000  # characters of a call before its arguments
_CLOSING = {"{": "}", "[": "]"}
_AFTER_WORD = ",}]< \t\r\n"  # after a number or a word of JSON


class EndedError(Exception):
    """The answer has ended where more of it was needed."""


class Found(NamedTuple):
    end: int
    values: Mapping[str, str]


class Pieces:
    """Collects an answer while it comes. Steps stop until there is more of it, and raise EndedError
    once there is none: what is read never depends on how the answer was cut."""

    def __init__(self) -> None:
        self.held = ""
        self.has_ended = False

    def take(self, length: int) -> str:
        """Return the beginning of what is held, which then is read."""
        taken, self.held = self.held[:length], self.held[length:]
        return taken

    def more(self) -> Steps[None]:
        if not self.has_ended:
            yield
        if self.has_ended:
            raise EndedError

    def after_space(self, place: int = 0) -> Steps[int]:
        """Return where the first character is that is no space."""
        while True:
            place = _after_space(self.held, place)
            if place < len(self.held):
                return place
            yield from self.more()

    def find(self, *heads: Sequence[str]) -> Steps[Found | None]:
        """Return where one of these heads ends that the held text begins with, however it is
        spaced. A head is made of literals and slots."""
        while True:
            found = [_matched(head, self.held) for head in heads]
            ended = next((each for each in found if isinstance(each, Found)), None)
            if ended is not None or True not in found:
                return ended
            yield from self.more()

    def value_end(self, place: int) -> Steps[tuple[int, str]]:
        """Return where the JSON value ends that begins here, and what is missing to close it."""
        value = JsonEnd()
        while True:
            place += value.find(self.held[place:])
            if value.is_complete:
                return place, value.missing
            yield from self.more()


class StepReader(ABC):
    """Reads an answer in steps."""

    def __init__(self) -> None:
        self.is_cut = False
        self._pieces = Pieces()
        self._steps = self._begun()
        next(self._steps)

    def push(self, markup: str) -> list[Part]:
        self._pieces.held += markup
        next(self._steps, None)
        return self._taken()

    def finish(self) -> list[Part]:
        self._pieces.has_ended = True
        next(self._steps, None)
        return self._taken()

    def _begun(self) -> Steps[None]:
        with suppress(EndedError):
            yield from self._pieces.more()
            yield from self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole answer."""

    @abstractmethod
    def _taken(self) -> list[Part]:
        """Return what was read since it was asked last."""


def _matched(head: Sequence[str], text: str) -> Found | bool:
    """Return True if the text may still become the head, False if it cannot."""
    place = 0
    values: dict[str, str] = {}
    for piece in head:
        slot = _SLOTS.get(piece)
        for part in [piece] if slot else "".join(piece.split()):
            place = _after_space(text, place)
            if place > _MAX_HEAD:
                return False
            if place == len(text):
                return True
            if slot is None and text[place] != part:
                return False
            found = slot.match(text, place) if slot else None
            if slot and found is None:
                return False
            values[part] = found.group() if found else part
            place = found.end() if found else place + 1
            if found and place == len(text):
                return True
    return Found(place, values)


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def first_of(markers: Sequence[str], text: str) -> tuple[int, str]:
    """Return where the first of `markers` is in the text, and which; else where one may begin that
    the text has not yet in full, and ""."""
    begun = len(text) - max((overlap(text, each) for each in markers), default=0)
    found = [(place, -len(each), each) for each in markers if (place := text.find(each)) >= 0]
    place, _, marker = min(found, default=(begun, 0, ""))
    return (place, marker) if place <= begun else (begun, "")


class JsonEnd:
    """Finds the end of a JSON value. It ends before "<" outside of a string, too, where the tag
    after a call begins: the model has forgotten a brace."""

    def __init__(self) -> None:
        self.is_complete = False
        self.missing = ""  # what closes a value that has ended too early
        self._open: list[str] = []  # what closes the arrays and objects that are open
        self._in_string = False
        self._is_escaped = False
        self._is_word = False  # or a number

    def find(self, piece: str) -> int:
        """Return how many characters of `piece` belong to the value."""
        for place, character in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
                if not (self._in_string or self._open):
                    return self._end(place + 1)
            elif character == '"' and not self._is_word:
                self._in_string = True
            elif character in _CLOSING and not self._is_word:
                self._open.append(_CLOSING[character])
            elif not self._open and character in _AFTER_WORD:
                return self._end(place)
            elif character in "}]":
                self._open.pop()
                if not self._open:
                    return self._end(place + 1)
            elif character == "<":
                self.missing = "".join(reversed(self._open))
                return self._end(place)
            else:
                self._is_word = not self._open
        return len(piece)

    def _end(self, place: int) -> int:
        self.is_complete = True
        return place
