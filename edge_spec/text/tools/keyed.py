"""Reads arguments that are written one by one, and tells them as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from edge_spec.text.stop_cutter import overlap
from edge_spec.text.tools.call_shape import CallShape, Keyed
from edge_spec.text.tools.part_list import PartList
from edge_spec.text.tools.pieces import TAG, EndedError, Pieces, Steps
from edge_spec.text.tools.values import ANY, TEXT, as_json, unescaped

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_AFTER = ",)}]<"  # a value
Types = Mapping[str | None, frozenset[str]]


def ends_of(form: CallShape) -> list[str]:
    """Return what may end a call, in order: signs, and tags."""
    return [*form.closing.strip().partition("<")[0], *TAG.findall(form.closing)]


class KeyedReader:
    """Reads the arguments of one call. Texts of formats without quotes are told while they are
    written, other values when they are complete: their types are those of the schema."""

    def __init__(self, form: CallShape, keyed: Keyed, pieces: Pieces, parts: PartList) -> None:
        self._form = keyed
        self._ends = ends_of(form)
        self._pieces = pieces
        self._parts = parts

    def read(self, types: Types) -> Steps[None]:
        """Read up to the end of the call."""
        pieces, names = self._pieces, set[str]()
        while (yield from self._goes_on(is_first=not names)):
            name = yield from self._name()
            if name is None:
                continue
            key, allowed = name
            known = types.get(key) or types.get(None)
            if known:
                allowed = allowed & known or known
            elif not allowed:
                allowed = ANY if self._form.values.quote else TEXT
            is_new = key not in names
            if is_new:
                self._parts.add_arguments(f"{', ' if names else '{'}{as_json(key)}: ")
            names.add(key)
            tell = self._parts.add_arguments if is_new else _forget
            if self._form.values.quote:
                place = yield from pieces.after_space()
                pieces.take(place)
                end = yield from self._literal_end()
                tell(self._quoted(pieces.take(end), allowed))
            else:
                yield from self._raw(allowed, tell)
        self._parts.add_arguments("}" if names else "{}")

    def _goes_on(self, *, is_first: bool) -> Steps[bool]:
        """Return True at the name of an argument, False at the end of the call."""
        pieces, form = self._pieces, self._form
        comma = form.comma.strip()
        while True:
            pieces.take((yield from pieces.after_space()))
            if comma and not is_first and pieces.held.startswith(comma):
                pieces.take(len(comma))
                pieces.take((yield from pieces.after_space()))
            if any(pieces.held.startswith(each) for each in self._ends):
                return False
            if any(each.startswith(pieces.held) for each in self._ends):
                yield from pieces.more()
                continue
            opening = yield from pieces.find([form.opening])
            if opening is not None:
                pieces.take(opening.end)
                return True
            while (next_tag := pieces.held.find("<", 1)) < 0:  # nothing is between arguments
                pieces.held = pieces.held[:1]
                yield from pieces.more()
            pieces.take(next_tag)

    def _name(self) -> Steps[tuple[str, frozenset[str]] | None]:
        """Return the name of the argument, and the types that it has by what is before its value;
        none are any. None where there is no name."""
        pieces, form = self._pieces, self._form
        colons = {form.colon: frozenset[str]()}
        if form.plain_colon is not None:
            colons = {form.colon: TEXT, form.plain_colon: ANY - TEXT}
        first = form.colon.strip()[:1]
        while (place := pieces.held.find(first)) < 0 and self._ends[0] not in pieces.held:
            yield from pieces.more()
        end = pieces.held.find(self._ends[0])
        if end >= 0 and (place < 0 or end < place):
            pieces.take(end)
            return None
        key = pieces.take(place).strip().strip("\"'")
        types = frozenset[str]()
        for colon in colons:
            found = yield from pieces.find([colon])
            if found is not None:
                types, end = colons[colon], found.end
                break
        else:  # something else is there: the value begins after the first sign of the same kind
            last = form.colon.rstrip()[-1]
            while (end := pieces.held.find(last) + 1) == 0:
                yield from pieces.more()
        pieces.take(end)
        space = form.colon[len(form.colon.rstrip()) :]
        if space and not form.values.quote:
            while not pieces.held:
                yield from pieces.more()
            pieces.take(len(space) if pieces.held.startswith(space) else 0)
        return key, types

    def _raw(self, types: frozenset[str], tell: Callable[[str], None]) -> Steps[None]:
        """Read a value that is written as it is, up to what closes it."""
        pieces = self._pieces
        closing = self._form.closing
        core = closing.strip()
        lead = closing[: len(closing) - len(closing.lstrip())]
        streams, may_end, searched = types == TEXT, False, 0
        if streams:
            tell('"')
        try:
            while True:
                place = pieces.held.find(core, max(0, searched - len(core)))
                while place >= 0 and "string" not in types and _is_in_text(pieces.held[:place]):
                    place = pieces.held.find(core, place + 1)
                if place >= 0:
                    break
                if streams and not may_end:
                    tell(as_json(pieces.take(self._num_sure(lead, core)))[1:-1])
                    may_end = self._ends[0] in pieces.held
                searched = len(pieces.held)
                yield from pieces.more()
        except EndedError:  # it may be that the model has closed the call and not the value
            place, core = pieces.held.find(self._ends[0]), ""
            if place < 0:
                raise
        value = pieces.held[:place]
        value = value.removesuffix(lead) if lead else value
        pieces.take(place + len(core))
        tell(f'{as_json(value)[1:-1]}"' if streams else self._form.values.meant(value, types))

    def _num_sure(self, lead: str, core: str) -> int:
        """Return how much of a text belongs to the value, whatever follows."""
        held = self._pieces.held
        ends = [lead + core, core, lead + self._ends[0], self._ends[0]]
        sure = len(held) - max(overlap(held, each) for each in ends)
        found = [place for each in ends if (place := held.find(each)) >= 0]
        return min([sure, *found])

    def _quoted(self, text: str, types: frozenset[str]) -> str:
        """Return a literal as JSON."""
        values = self._form.values
        quote = next((each for each in (values.quote, '"', "'") if text.startswith(each)), "")
        if not quote:
            return values.meant(text, types)
        text = text.removeprefix(quote).removesuffix(quote)
        text = unescaped(text) if len(quote) == 1 else text
        return as_json(text) if "string" in types else values.meant(as_json(text), types)

    def _literal_end(self) -> Steps[int]:
        """Return where a text in quotes, an array, an object or a word ends."""
        pieces, own = self._pieces, self._form.values.quote
        place, nested, within = 0, list[str](), ""
        while True:
            rest = pieces.held[place : place + len(own)]
            if not rest or (own.startswith(rest) and rest != own):
                yield from pieces.more()
                continue
            character = rest[0]
            if within:
                if character == "\\" and len(within) == 1:
                    place += 2
                    continue
                if not pieces.held.startswith(within, place):
                    place += 1
                    continue
                place += len(within)
                if len(within) == 1 and not nested:  # what follows tells whether it ends the text
                    after = yield from pieces.after_space(place)
                    if pieces.held[after] not in _AFTER:
                        continue
                within = ""
                if not nested:
                    return place
            elif rest == own or (character in "\"'" and (nested or not place)):
                within = own if rest == own else character
                place += len(within)
            elif not nested and character in _AFTER:
                return place
            else:
                place += 1
                if character in _CLOSING:
                    nested.append(_CLOSING[character])
                elif nested and character == nested[-1]:
                    nested.pop()
                    if not nested:
                        return place


def _forget(text: str) -> None:
    """Leave out an argument that was there before."""


def _is_in_text(text: str) -> bool:
    """Return True if JSON that begins so is within a text."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
