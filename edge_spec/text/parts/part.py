"""Parts of an answer (thought, text, tool calls), their incremental readers, and stop strings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where more of the answer is needed


class PartKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True)
class CallHead:
    """A call without its arguments. index: among the answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Part:
    """The next piece of a part.

    text: for calls, of the arguments' JSON. If empty, the piece only says that what was just read,
    such as a tag, belongs to this kind. call: set on the first piece of each call. end: of the
    piece in the pushed answer; for calls, of what was read so far.
    """

    kind: PartKind
    text: str
    call: CallHead | None = None
    end: int = field(default=0, compare=False)


class EndedError(Exception):
    """The answer ended where more of it was needed."""


class PartReader(ABC):
    """Splits one answer into parts while it is generated.

    Reading pauses where more of the answer is needed, and gets EndedError if it has ended, so the
    result does not depend on the pieces that the answer comes in. is_cut: the answer ended within a
    call.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._held = ""  # not read yet
        self._num_pushed = 0
        self._has_ended = False
        self._parts: list[Part] = []
        self._steps = self._begun()
        next(self._steps)

    def push(self, markup: str) -> list[Part]:
        """Return the parts known so far. markup: the answer's next piece, special tokens spelled
        out. Text and thoughts are slices of the pushed answer."""
        self._held += markup
        self._num_pushed += len(markup)
        next(self._steps, None)
        taken, self._parts = self._parts, []
        return taken

    def finish(self) -> list[Part]:
        """Return what was held back at the answer's end."""
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
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _after_space(self, place: int = 0) -> Steps[int]:
        while (place := after_space(self._held, place)) == len(self._held):
            yield from self._more()
        return place

    def _add(self, kind: PartKind, text: str, call: CallHead | None = None) -> None:
        """Add a piece that was just read; merge it with the last one if that is next to it."""
        self._join(Part(kind, text, call, self._num_pushed - len(self._held)))

    def _join(self, part: Part) -> None:
        last = self._parts[-1] if self._parts else None
        if (
            last
            and (last.text or last.call)
            and part.text
            and not part.call
            and last.kind is part.kind
            and (part.kind is PartKind.CALL or last.end == part.end - len(part.text))
        ):
            self._parts[-1] = replace(last, text=last.text + part.text, end=part.end)
        else:
            self._parts.append(part)


def after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def first_of(markers: Sequence[str], text: str) -> tuple[int, str]:
    """Return place and text of the first marker; else the place where one may begin, and ""."""
    begun = len(text) - max((overlap(text, each) for each in markers), default=0)
    found = [(place, -len(each), each) for each in markers if (place := text.find(each)) >= 0]
    place, _, marker = min(found, default=(begun, 0, ""))
    return (place, marker) if place <= begun else (begun, "")


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


class StopCutter:
    """Holds text back while it may begin a stop string; cuts at the first one.

    A stop string may contain the name of a special token, which the text lacks, so `push` gets that
    name. If the text ends in the part before it, it stops there, whatever follows the name.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, piece: str, special: str = "") -> str:
        """Return the text to show; "" after a stop string. special: name of the special token after
        the piece."""
        if self.stopped:
            return ""
        if not special and not self._held and self._beginnings.isdisjoint(piece):
            return piece  # fast path: lists of stop strings may be long
        text = self._held + piece
        possible = [stop for stop in self._stops if stop[0] in text]
        # End and beginning of each: the first to be complete wins, however the text is cut.
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
        """Return the held text at the end."""
        held, self._held = self._held, ""
        return held
