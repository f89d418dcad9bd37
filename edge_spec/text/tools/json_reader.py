"""Reads calls whose arguments are JSON out of an answer, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from edge_spec.text.parts.part import Part
from edge_spec.text.tools.call_object import CallObject, Role, ValueEnd
from edge_spec.text.tools.json_shape import JsonShape
from edge_spec.text.tools.literals import (
    PARTIAL,
    Found,
    Piece,
    Slot,
    first_of,
    matched,
    tags_of,
)
from edge_spec.text.tools.part_list import PartList
from edge_spec.text.tools.untagged import (
    FENCE,
    FIRST_OPENINGS,
    LEFT,
    OPENINGS,
    STARTS,
    after_ending,
)

# Models that were trained on several forms take the words of another one.
_ROLES = {
    "name": Role.NAME,
    "tool_name": Role.NAME,
    "arguments": Role.ARGUMENTS,
    "parameters": Role.ARGUMENTS,
}
_BARE_ROLES = {**_ROLES, "type": Role.OTHER}
_FUNCTION = re.compile(Slot.NAME.value)


class JsonReader:
    """Splits an answer into text and calls of a form. What looks like a call and has no name stays
    text, so nothing that the model wrote is lost.

    Many a small model leaves the tags out: an object with the name and the arguments of a function
    that may be called is a call all the same where it begins the answer, a line or a block of code.
    """

    def __init__(self, form: JsonShape, names: Collection[str]) -> None:
        """names: of the functions that may be called; empty where they are not known."""
        self.is_cut = False
        self._form = form
        self._names = names
        self._parts = PartList(form.ids)
        self._openings = form.openings
        self._markers = [form.marker_of(opening) for opening in self._openings]
        self._strays = set(tags_of(form.closing)).difference(self._markers)  # after a call
        self._is_bare = form.is_bare or (form.is_named and bool(names))  # the call has no tags
        self._starts = (
            [each for each in STARTS if each not in self._markers]
            if names and self._is_bare
            else []
        )
        self._is_in_code = False
        self._read: Callable[[], bool] = self._read_first if self._is_bare else self._read_text
        self._held = ""
        self._begun = ""  # of a call whose name is not known
        self._object = CallObject({})
        self._arguments = ValueEnd()
        self._is_known = False  # the call has been told of

    def push(self, markup: str) -> list[Part]:
        self._held += markup
        while self._read():
            pass
        return self._parts.taken()

    def finish(self) -> list[Part]:
        read = self._read
        self.is_cut = read in (self._read_head, self._read_object, self._read_arguments)
        is_unknown = read == self._read_object and not self._is_known
        is_first = self._is_bare and not self._parts.num_calls
        if is_first and is_unknown and self._object.name not in self._names:
            self.is_cut = False
            self._parts.add_text(self._begun)
        elif read in (self._read_first, self._read_text, self._read_start):
            self._parts.add_text(self._held)
        self._held = ""
        return self._parts.taken()

    # What comes next. Each reads of `_held` what it can, and says whether another one goes on.

    def _read_first(self) -> bool:
        """The whole answer is a call, or a list of some, or none of it."""
        begun = self._begin_bare(FIRST_OPENINGS)
        if begun is None:
            self._go_on_with_text()
            return True
        return begun

    def _begin_bare(self, openings: Sequence[str]) -> bool | None:
        """Begins a call without tags, if one of these openings, which end in its first brace, comes
        next; None if none may."""
        own = tuple(self._markers)
        found = [matched([each], self._held) for each in openings if not each.startswith(own)]
        starts = [each.end - 1 for each in found if isinstance(each, Found)]
        if not starts:
            return False if PARTIAL in found else None
        self._begun, self._held = self._held[: starts[0]], self._held[starts[0] :]
        self._is_bare = True
        return self._begin_object()

    def _go_on_with_text(self) -> None:
        self._is_bare, self._read = self._form.is_bare, self._read_text

    def _read_text(self) -> bool:
        strays = self._strays if self._parts.num_calls else ()
        place, marker = first_of([*self._markers, *self._starts, *strays], self._held)
        place += marker.startswith("\n")
        self._parts.add_text(self._held[:place])
        self._held = self._held[place:]
        if marker in strays:
            self._held = self._held.removeprefix(marker)
        elif marker in self._starts:
            self._read = self._read_start
        elif marker:
            self._is_bare, self._read = self._form.is_bare, self._read_head
        return bool(marker)

    def _read_start(self) -> bool:
        """The held text begins with a fence, a tag that is none of the form's, or a brace."""
        begun = None if self._is_in_code else self._begin_bare(OPENINGS)
        if begun is not None:
            return begun
        length = 1
        if self._held.startswith(FENCE):
            if self._held == FENCE:
                return False
            length = len(FENCE)
            self._is_in_code = not self._is_in_code or self._held[length].isalpha()
        self._parts.add_text(self._held[:length])
        self._held, self._read = self._held[length:], self._read_text
        return True

    def _read_head(self) -> bool:
        """The held text begins with a marker."""
        is_open = False
        for opening in self._openings:
            found = matched(self._head(opening), self._held)
            is_open |= found is PARTIAL
            if isinstance(found, Found) and (begun := self._begin_call(found)) is not None:
                return begun
        if is_open:
            return False
        marker = max((each for each in self._markers if self._held.startswith(each)), key=len)
        self._parts.add_text(marker)
        self._held = self._held.removeprefix(marker)
        self._read = self._read_text
        return True

    def _head(self, opening: str) -> Sequence[Piece]:
        return [opening] if self._form.is_object else [opening, *self._form.call]

    def _begin_call(self, found: Found) -> bool | None:
        """Begins a call of which the text up to its object was found; None if none follows."""
        rest = self._held[found.end :].lstrip()
        if not rest:
            return False
        if rest[0] != "{":
            return None
        if self._form.is_object:
            self._begun, self._held = self._held[: -len(rest)], rest
            return self._begin_object()
        name = found.values[Slot.NAME]
        self._parts.begin_call(name, self._form.read_id(name, found.values))
        self._arguments = ValueEnd()
        self._held, self._read = rest, self._read_arguments
        return True

    def _begin_object(self) -> bool:
        roles = _BARE_ROLES if self._is_bare else _ROLES | self._form.roles
        names = self._names if self._is_bare else ()
        self._object = CallObject(roles, self._form.is_keyed, is_strict=self._is_bare, names=names)
        self._is_known, self._read = False, self._read_object
        return True

    def _read_object(self) -> bool:
        call = self._object
        length = call.push(self._held)
        if not self._is_known:
            self._begun += self._held[:length]
        self._held = self._held[length:]
        self._is_known = self._is_known or self._tell_head()
        if self._is_known:
            self._parts.add_arguments(call.arguments)
            call.arguments = ""
        elif call.is_complete or call.is_broken:
            self._parts.add_text(self._begun)
            self._is_in_code |= self._begun.lstrip().startswith(FENCE)
            self._go_on_with_text()
            return True
        if call.is_complete or call.is_broken:
            if not call.has_arguments:
                self._parts.add_arguments("{}")
            self._read = self._read_end
            return True
        return False

    def _tell_head(self) -> bool:
        """Says whether the call is one, and its name and where the arguments begin are known."""
        call = self._object
        if call.name is None or not _FUNCTION.fullmatch(call.name):
            return False
        if not (call.has_arguments or (call.is_complete and not self._is_bare)):
            return False
        if self._is_bare and self._names and call.name not in self._names:
            return False
        self._parts.begin_call(call.name, call.id)
        return True

    def _read_arguments(self) -> bool:
        length = self._arguments.find(self._held)
        self._parts.add_arguments(self._held[:length])
        self._held = self._held[length:]
        if self._arguments.is_complete:
            self._parts.add_arguments(self._arguments.missing)
            self._read = self._read_end
        return self._arguments.is_complete

    def _read_end(self) -> bool:
        """A call is complete; what the form has after it is left out."""
        found = self._next_call()
        if found is not None:
            return found
        rest = self._held.lstrip()
        closing = matched([self._form.closing], rest)
        if not rest or closing is PARTIAL:
            return False
        after = after_ending(rest) if self._is_bare else None
        if after is PARTIAL:
            return False
        if after is not None:
            self._held = after
        elif isinstance(closing, Found) and closing.end:
            self._held = rest[closing.end :]
            self._read = self._read_text
        elif rest[0] in LEFT:
            self._held = rest[1:]
        elif rest[0] == "{" and self._form.is_object:
            self._begun, self._held = self._held[: -len(rest)], rest
            return self._begin_object()
        else:
            self._read = self._read_text
        return True

    def _next_call(self) -> bool | None:
        """Begins the call that follows, if one does; None if none may."""
        if self._is_bare:
            rest = self._held.lstrip("; \n")
            if not rest:
                return False
            between: str | None = self._held[: len(self._held) - len(rest)]
        else:
            between = self._form.between
        if between is None:
            return None
        found = matched(self._head(between), self._held)
        if found is PARTIAL:
            return False
        return None if found is None else self._begin_call(found)
