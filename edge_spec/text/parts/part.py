"""Parts of an answer: what the model thought, what it says, and the calls of tools; and how they
are read while it is written, and ended by stop strings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # they stop where more of the answer is needed


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


class EndedError(Exception):
    """The answer has ended where more of it was needed."""


class PartReader(ABC):
    """Tells the parts of one answer apart while it is written.

    Reads in steps, which stop until there is more of the answer, and raise EndedError once there is
    none: what is read never depends on the pieces that the answer comes in. is_cut: the answer has
    ended within a call.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._held = ""  # what is not read yet
        self._has_ended = False
        self._parts: list[Part] = []
        self._steps = self._begun()
        next(self._steps)

    def push(self, markup: str) -> list[Part]:
        """Returns what is known with this piece of the answer, in which special tokens are written
        out. Pieces of a text or of a thought are slices of the answer as it was pushed."""
        self._held += markup
        next(self._steps, None)
        taken, self._parts = self._parts, []
        return taken

    def finish(self) -> list[Part]:
        """Returns what was held back of the answer, which has ended."""
        self._has_ended = True
        return self.push("")

    def _begun(self) -> Steps[None]:
        with suppress(EndedError):
            yield from self._more()
            yield from self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole answer."""

    def _more(self) -> Steps[None]:
        if not self._has_ended:
            yield
        if self._has_ended:
            raise EndedError

    def _take(self, length: int) -> str:
        """Return the beginning of what is held, which then is read."""
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _after_space(self, place: int = 0) -> Steps[int]:
        """Return where the first character is that is no space."""
        while (place := after_space(self._held, place)) == len(self._held):
            yield from self._more()
        return place

    def _add(self, kind: PartKind, text: str, call: CallHead | None = None) -> None:
        """Tell a piece; it joins the one before, if that is of the same part and no mere tag."""
        last = self._parts[-1] if self._parts else None
        if call is None and text and last and last.kind is kind and (last.text or last.call):
            self._parts[-1] = Part(kind, last.text + text, last.call)
        else:
            self._parts.append(Part(kind, text, call))


def after_space(text: str, place: int) -> int:
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


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


class StopCutter:
    """Holds text back while it may be the beginning of a stop string; cuts at the first one.

    A stop string may name a special token, which is no part of the text: `push` is told of these
    tokens. Where the text before one is that of the stop string, it ends there, whatever follows.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.found: str | None = None  # the stop string that has ended the text

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, piece: str, special: str = "") -> str:
        """Returns the text that can be shown now. After a stop string nothing follows. special:
        the name of the special token that this is, after its piece."""
        if self.stopped:
            return ""
        if not special and not self._held and self._beginnings.isdisjoint(piece):
            return piece  # no stop string begins here: told fast, since lists of them are long
        text = self._held + piece
        possible = [stop for stop in self._stops if stop[0] in text]
        # Where each ends and begins: the one that is complete first, whatever pieces come.
        places = [(at + len(stop), at, stop) for stop in possible if (at := text.find(stop)) >= 0]
        for stop in self._stops if special else ():
            before, is_named, _ = stop.partition(special)
            if is_named and text.endswith(before):
                places.append((len(text) + 1, len(text) - len(before), stop))
        begun = len(text) - max((overlap(text, stop) for stop in possible), default=0)
        if places:
            _, begun, self.found = min(places)
        shown, self._held = text[:begun], "" if self.stopped else text[begun:]
        return shown

    def finish(self) -> str:
        """The text held back, when nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held
