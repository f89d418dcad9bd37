"""The steps in which calls are read out of an answer: heads, values, and arguments one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edge_spec.text.parts.part import (
    CallHead,
    EndedError,
    PartKind,
    StepReader,
    Steps,
    after_space,
    first_of,
)
from edge_spec.text.tools.arguments import ANY, TEXT, Keyed, as_json, unescaped
from edge_spec.text.tools.call_shape import ID, INDEX, NAME, SHORT_ID, TAG, CallShape, new_id

_SLOTS = {
    NAME: re.compile(r"[a-zA-Z0-9_.-]{1,128}"),
    ID: re.compile(r"[a-zA-Z0-9_.:/-]{1,128}"),
    INDEX: re.compile(r"[0-9]{1,9}"),
}
_MAX_HEAD = 2000  # characters of a call before its arguments
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_AFTER = ",)}]<"  # a value
Types = Mapping[str | None, frozenset[str]]


class Found(NamedTuple):
    end: int
    values: Mapping[str, str]


class CallSteps(StepReader):
    """Tells text and calls. White space between calls and after the last one is left out, however
    it comes in pieces."""

    def __init__(self, *, short_ids: bool = False) -> None:
        self._num_calls = 0
        self._short_ids = short_ids
        self._ids: set[str] = set()
        self._gap: str | None = None  # white space since the last call; None: text came after it
        super().__init__()

    def _add_text(self, text: str) -> None:
        if self._gap is not None:
            text = self._gap + text
            self._gap = None if text.strip() else text
        if self._gap is None and text:
            self._add(PartKind.TEXT, text)

    def _begin_call(self, name: str, id: str | None = None) -> None:
        """id: as the model wrote it. One that an earlier call of the answer has is replaced."""
        if not id or id in self._ids or (self._short_ids and not SHORT_ID.fullmatch(id)):
            id = new_id(self._short_ids)
        self._ids.add(id)
        self._gap = ""
        self._add(PartKind.CALL, "", CallHead(self._num_calls, id, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(PartKind.CALL, text)

    def _find(self, *heads: Sequence[str]) -> Steps[Found | None]:
        """Return where one of these heads ends that the held text begins with, however it is
        spaced. A head is made of literals and slots."""
        while True:
            found = [_matched(head, self._held) for head in heads]
            ended = next((each for each in found if isinstance(each, Found)), None)
            if ended is not None or True not in found:
                return ended
            yield from self._more()

    def _value_end(
        self, place: int = 0, quote: str = "", *, tells: bool = False
    ) -> Steps[tuple[int, str]]:
        """Return where the value ends that begins here, and what is missing to close it.

        JSON ends before "<" outside of a text, too, where the tag after a call begins: the model
        has forgotten a brace. quote: of values that are no JSON, beside ' and "; what follows a
        text tells whether it ends there. tells: tell arguments while they are read.
        """
        quotes, after = ((quote, '"', "'"), _AFTER) if quote else (('"',), ",}]< \t\r\n")
        closing = tuple(each for each in _CLOSING.values() if each in after)
        nested, within = list[str](), ""  # what closes each array that is open, and the text
        is_begun = False
        while True:
            ahead = self._held[place : place + max(1, len(quote))]
            if not ahead or (quote.startswith(ahead) and ahead != quote):
                if tells:
                    place -= len(self._held)
                    self._add_arguments(self._take(len(self._held)))
                yield from self._more()
                continue
            character = ahead[0]
            if within:
                if character == "\\" and len(within) == 1:
                    place += 2
                elif self._held.startswith(within, place):
                    place += len(within)
                    if nested:
                        within = ""
                        continue
                    if not quote or len(within) > 1:
                        return place, ""
                    end = yield from self._after_space(place)
                    if self._held[end] in after:
                        return place, ""
                else:
                    place += 1
            elif (nested or not is_begun or ahead == quote) and (
                opened := next((each for each in quotes if ahead.startswith(each)), "")
            ):
                within = opened
                place += len(opened)
            elif (not nested and character in after) or (not quote and character == "<"):
                return place, "".join(reversed(nested))
            else:
                place += 1
                if _CLOSING.get(character) in closing and (nested or quote or not is_begun):
                    nested.append(_CLOSING[character])
                elif character in nested[-1:] or (nested and not quote and character in closing):
                    nested.pop()
                    if not nested:
                        return place, ""
            is_begun = True


class KeyedSteps(CallSteps):
    """Reads arguments that are written one by one, and tells them as JSON. Texts of formats without
    quotes are told while they are written, other values when they are complete: their types are
    those of the schema."""

    def __init__(self, form: CallShape) -> None:
        self._form = form
        self._keyed = form.keyed or Keyed()
        # What may end a call, in order: signs, and tags.
        closing = form.closing.strip()
        self._ends = (*closing.partition("<")[0], *TAG.findall(closing))
        super().__init__(short_ids=form.short_ids)

    def _read_arguments(self, types: Types) -> Steps[None]:
        """Read up to the end of the call."""
        keyed, names = self._keyed, set[str]()
        while (yield from self._goes_on(is_first=not names)):
            key = yield from self._name()
            if key is None:
                continue
            allowed = types.get(key) or types.get(None) or (ANY if keyed.quote else TEXT)
            is_new = key not in names
            if is_new:
                self._add_arguments(f"{', ' if names else '{'}{as_json(key)}: ")
            names.add(key)
            # An argument that was there before is left out.
            tell = self._add_arguments if is_new else lambda text: None
            if keyed.quote:
                self._take((yield from self._after_space()))
                end, _ = yield from self._value_end(0, keyed.quote)
                tell(_quoted(self._take(end), keyed, allowed))
            else:
                yield from self._raw(allowed, tell)
        self._add_arguments("}" if names else "{}")

    def _goes_on(self, *, is_first: bool) -> Steps[bool]:
        """Return True at the name of an argument, False at the end of the call."""
        comma = self._keyed.comma.strip()
        while True:
            self._take((yield from self._after_space()))
            if comma and not is_first and self._held.startswith(comma):
                self._take(len(comma))
                self._take((yield from self._after_space()))
            if self._held.startswith(self._ends):
                return False
            if any(each.startswith(self._held) for each in self._ends):
                yield from self._more()
                continue
            opening = yield from self._find([self._keyed.opening])
            if opening is not None:
                self._take(opening.end)
                return True
            while (next_tag := self._held.find("<", 1)) < 0:  # nothing is between arguments
                self._held = self._held[:1]
                yield from self._more()
            self._take(next_tag)

    def _name(self) -> Steps[str | None]:
        """Return the name of the argument, None where there is none."""
        keyed, ending = self._keyed, self._ends[0]
        first, last = keyed.colon.strip()[:1], keyed.colon.rstrip()[-1]
        while (place := self._held.find(first)) < 0 and ending not in self._held:
            yield from self._more()
        end = self._held.find(ending)
        if end >= 0 and (place < 0 or end < place):
            self._take(end)
            return None
        key = self._take(place).strip().strip("\"'")
        found = yield from self._find([keyed.colon])
        if found is None:  # the value begins after the first sign of the same kind
            while last not in self._held:
                yield from self._more()
        self._take(self._held.find(last) + 1 if found is None else found.end)
        space = keyed.colon[len(keyed.colon.rstrip()) :]
        if space and not keyed.quote:
            while not self._held:
                yield from self._more()
            self._take(len(space) if self._held.startswith(space) else 0)
        return key

    def _raw(self, types: frozenset[str], tell: Callable[[str], None]) -> Steps[None]:
        """Read a value that is written as it is, up to what closes it."""
        keyed, ending = self._keyed, self._ends[0]
        core = keyed.closing.strip()
        lead = keyed.closing[: len(keyed.closing) - len(keyed.closing.lstrip())]
        streams, may_end, searched = types == TEXT, False, 0
        if streams:
            tell('"')
        try:
            while True:
                place = self._held.find(core, max(0, searched - len(core)))
                while place >= 0 and "string" not in types and _is_in_text(self._held[:place]):
                    place = self._held.find(core, place + 1)
                if place >= 0:
                    break
                if streams and not may_end:
                    ends = (lead + core, core, lead + ending, ending)
                    tell(as_json(self._take(first_of(ends, self._held)[0]))[1:-1])
                    may_end = ending in self._held
                searched = len(self._held)
                yield from self._more()
        except EndedError:  # it may be that the model has closed the call and not the value
            place, core = self._held.find(ending), ""
            if place < 0:
                raise
        value = self._held[:place]
        value = value.removesuffix(lead) if lead else value
        self._take(place + len(core))
        tell(f'{as_json(value)[1:-1]}"' if streams else keyed.meant(value, types))


def _quoted(text: str, keyed: Keyed, types: frozenset[str]) -> str:
    """Return a literal as JSON."""
    quote = next((each for each in (keyed.quote, '"', "'") if text.startswith(each)), "")
    if not quote:
        return keyed.meant(text, types)
    text = text.removeprefix(quote).removesuffix(quote)
    text = unescaped(text) if len(quote) == 1 else text
    return as_json(text) if "string" in types else keyed.meant(as_json(text), types)


def _is_in_text(text: str) -> bool:
    """Return True if JSON that begins so is within a text."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def _matched(head: Sequence[str], text: str) -> Found | bool:
    """Return True if the text may still become the head, False if it cannot."""
    place = 0
    values: dict[str, str] = {}
    for piece in head:
        slot = _SLOTS.get(piece)
        for part in [piece] if slot else "".join(piece.split()):
            place = after_space(text, place)
            if place > _MAX_HEAD:
                return False
            if place == len(text):
                return True
            if slot is None:
                if text[place] != part:
                    return False
                place += 1
                continue
            found = slot.match(text, place)
            if found is None or found.end() == len(text):
                return found is not None
            values[part], place = found.group(), found.end()
    return Found(place, values)
