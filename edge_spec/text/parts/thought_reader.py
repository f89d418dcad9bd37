"""Reads the thought at the beginning of an answer, and passes on what follows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from edge_spec.text.parts.part import Part, PartKind, PartReader
from edge_spec.text.stop_cutter import overlap


@dataclass(frozen=True)
class PossibleCalls:
    """The texts that a call of a tool begins with, and the names of tools that may be called."""

    markers: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()


NO_CALLS = PossibleCalls()
_MAX_HEAD = 200  # characters of a call before its arguments


class LastCalls:
    """Reads what may be the calls of an answer whose thought was not ended before them, as some
    models write them. They are calls where nothing follows, else the model has thought of them."""

    def __init__(self, mark: str, reader: PartReader, names: frozenset[str], closing: str) -> None:
        """mark: what the first one begins with. closing: the tag that may end the thought after
        all."""
        self._mark = mark
        self._reader = reader
        self._names = names
        self._closing = closing
        self._written = ""
        self._num_read = 0
        self._calls: list[Part] = []

    def push(self, markup: str) -> bool:
        """Says whether all that was written may still be calls."""
        self._written += markup
        end = self._written.find(self._closing, self._num_read)
        if end < 0:
            end = len(self._written) - overlap(self._written[self._num_read :], self._closing)
        while self._num_read < end:  # one by one, so that pieces make no difference
            parts = self._reader.push(self._written[self._num_read])
            if not self._take(parts) or (not self._calls and self._num_read > _MAX_HEAD):
                return False
            self._num_read += 1
        rest = self._written[end:]
        return self._closing.startswith(rest) or not rest.removeprefix(self._closing).strip()

    def finish(self) -> list[Part]:
        """Returns the calls, if there are any and all are whole."""
        rest = self._written[self._num_read :].removeprefix(self._closing)
        is_whole = self._take(self._reader.finish()) and not self._reader.is_cut
        return self._calls if is_whole and not rest.strip() else []

    def thought(self) -> tuple[str, str]:
        """Returns what of it belongs to the thought, and what is to be read again."""
        place = self._num_read if self._calls else len(self._mark)
        return self._written[:place], self._written[place:]

    def _take(self, parts: list[Part]) -> bool:
        calls = [part for part in parts if part.kind is PartKind.CALL]
        self._calls += calls
        named = all(part.call.name in self._names for part in calls if part.call is not None)
        others = (part.text for part in parts if part.kind is not PartKind.CALL)
        return named and not "".join(others).strip()


class ThoughtReader:
    """Reads a thought, if the answer begins with one, and then all else. What looks like a thought
    later on stays text. White space around the thought belongs to neither it nor the text."""

    def __init__(
        self,
        opening: str,
        closing: str,
        following: Callable[[], PartReader],
        *,
        is_opened: bool,
        is_begun: bool,
        openings: tuple[str, str],
        calls: PossibleCalls,
    ) -> None:
        """openings: of a text without a thought, and of one after it."""
        self._opening, self._closing = opening, closing
        self._text_opening, self._lead = openings
        self._make_following = following
        self._following = following()
        self._calls = calls
        self._marks = [closing, *calls.markers]
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._held = ""
        self._space = ""  # before what may be a call
        self._last_calls: LastCalls | None = None
        self._parts: list[Part] = []
        self._read = self._read_first_space if is_opened else self._read_opening
        if is_begun:
            self._read = self._read_thought

    @property
    def is_cut(self) -> bool:
        return self._following.is_cut

    def push(self, markup: str) -> list[Part]:
        self._held += markup
        self._read_all()
        return self._told()

    def finish(self) -> list[Part]:
        while self._last_calls is not None:
            if calls := self._last_calls.finish():
                self._parts += [Part(PartKind.REASONING, ""), *calls]
                return self._told()
            self._pass_over(self._last_calls)
            self._read_all()
        held, self._held = self._held, ""
        if self._read == self._read_thought:
            self._tell(held)
        elif self._read in (self._read_opening, self._read_last_space, self._read_lead):
            self._parts += self._following.push(held)
        self._parts += self._following.finish()
        return self._told()

    def _read_all(self) -> None:
        while self._read():
            pass

    def _told(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _tell(self, thought: str) -> None:
        if thought:
            self._parts.append(Part(PartKind.REASONING, thought))

    # What comes next. Each reads of `_held` what it can, and says whether another one goes on.

    def _read_opening(self) -> bool:
        text, opening = self._held.lstrip(), self._opening
        if text.startswith(opening):
            self._held = text[len(opening) :]
            self._parts.append(Part(PartKind.REASONING, ""))
            self._read = self._read_first_space
        elif any(text != each and each.startswith(text) for each in (opening, self._text_opening)):
            return False
        else:
            if self._text_opening:
                self._held = text.removeprefix(self._text_opening)
            self._read = self._read_rest
        return True

    def _read_first_space(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._read_thought
        return bool(self._held)

    def _read_thought(self) -> bool:
        found = self._mark.search(self._held)
        if found is None:
            begun = max(overlap(self._held, mark) for mark in self._marks)
            sure = self._held[: len(self._held) - begun].rstrip()
            self._tell(sure)
            self._held = self._held[len(sure) :]
            return False
        before = self._held[: found.start()]
        thought = before.rstrip()
        self._tell(thought)
        if found[0] != self._closing:
            self._space = before[len(thought) :]
            self._last_calls = LastCalls(
                found[0], self._make_following(), self._calls.names, self._closing
            )
            self._held = self._held[found.start() :]
            self._read = self._read_call
            return True
        self._parts.append(Part(PartKind.REASONING, ""))
        self._held = self._held[found.end() :]
        self._read = self._read_last_space
        return True

    def _read_call(self) -> bool:
        assert self._last_calls is not None
        are_possible = self._last_calls.push(self._held)
        self._held = ""
        if not are_possible:
            self._pass_over(self._last_calls)
        return not are_possible

    def _pass_over(self, calls: LastCalls) -> None:
        """Goes on with the thought, of which these are a part."""
        thought, self._held = calls.thought()
        self._last_calls = None
        self._tell(self._space + thought)
        self._read = self._read_thought

    def _read_last_space(self) -> bool:
        """A thought that was ended for the model may be ended by it, too."""
        self._held = self._held.lstrip()
        if self._closing.startswith(self._held) and self._held != self._closing:
            return False
        if self._held.startswith(self._closing):
            self._held = self._held.removeprefix(self._closing)
            return True
        self._read = self._read_lead
        return True

    def _read_lead(self) -> bool:
        lead = self._lead
        if lead.startswith(self._held) and self._held != lead:
            return False
        self._held = self._held.removeprefix(lead)
        self._read = self._read_rest
        return True

    def _read_rest(self) -> bool:
        self._parts += self._following.push(self._held)
        self._held = ""
        return False
