"""Reads calls whose arguments stand one by one, and tells the arguments as JSON."""

from __future__ import annotations

from collections.abc import Callable

from edge_spec.errors import UsageError
from edge_spec.text.parts.part import Part
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.argument_value import TEXT, ArgumentValue
from edge_spec.text.tools.keyed_shape import KeyedShape, argument_types
from edge_spec.text.tools.literals import PARTIAL, Found, Slot, first_of, matched
from edge_spec.text.tools.part_list import PartList
from edge_spec.text.tools.value_literal import as_json
from edge_spec.text.tools.value_style import ANY

_PYTHON = ("<|python_start|>", "<|python_tag|>")  # before calls of Llama that would be bare without


class KeyedReader:
    """Splits an answer into text and calls. Texts are told while they are written, other values
    when they are complete: their types are those of the function's schema."""

    def __init__(self, form: KeyedShape, tools: Tools) -> None:
        self.is_cut = False
        self._form = form
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._parts = PartList()
        self._markers = [each for each in (form.marker, form.inner_marker) if each]
        self._ends = form.ends
        self._types: dict[str | None, frozenset[str]] = {}
        self._names: set[str] = set()  # of the call's arguments so far
        self._value = ArgumentValue(form, TEXT)
        self._held = ""
        self._read: Callable[[], bool] = self._read_first if form.is_bare else self._read_text

    def push(self, markup: str) -> list[Part]:
        self._held += markup
        while self._read():
            pass
        return self._parts.taken()

    def finish(self) -> list[Part]:
        read = self._read
        if read == self._read_value and self._end_early():
            read = self._read_end
        is_begun = read == self._read_head and self._held.strip() not in self._markers
        self.is_cut = is_begun or read in (self._read_argument, self._read_key, self._read_value)
        if not self.is_cut and read != self._read_end:
            self._parts.add_text(self._held)
        self._held = ""
        return self._parts.taken()

    # What comes next. Each reads of `_held` what it can, and says whether another one goes on.

    def _read_first(self) -> bool:
        """The answer begins with a call, or has none."""
        if any(each.startswith(self._held.lstrip()) for each in _PYTHON):
            return False
        tag = next((each for each in _PYTHON if self._held.lstrip().startswith(each)), "")
        begun = self._begun(tag + self._form.opening)
        if begun is None:
            self._read = self._read_rest
            return True
        return begun

    def _read_rest(self) -> bool:
        self._parts.add_text(self._held)
        self._held = ""
        return False

    def _read_text(self) -> bool:
        strays = self._strays() if self._parts.num_calls else []
        place, marker = first_of([*self._markers, *strays], self._held)
        self._parts.add_text(self._held[:place])
        self._held = self._held[place:]
        if marker in self._markers:
            self._read = self._read_head
        else:
            self._held = self._held.removeprefix(marker)
        return bool(marker)

    def _strays(self) -> list[str]:
        """Returns tags that a model may leave behind after its calls."""
        return [each for each in self._ends if each.startswith(("<", "[")) and len(each) > 1]

    def _read_head(self) -> bool:
        """The held text begins with a marker."""
        form = self._form
        is_inner = bool(form.inner_marker) and self._held.startswith(form.inner_marker)
        begun = self._begun(form.inner_marker if is_inner else form.opening, is_known=is_inner)
        if begun is None:
            marker = next(each for each in self._markers if self._held.startswith(each))
            self._parts.add_text(marker)
            self._held = self._held.removeprefix(marker)
            self._read = self._read_text
            return True
        return begun

    def _begun(self, opening: str, *, is_known: bool = False) -> bool | None:
        """Begins a call if the held text does; None if it does not.

        is_known: only a function that the model was told of is called so.
        """
        form = self._form
        head = matched([opening, Slot.NAME, form.head], self._held)
        if head is PARTIAL:
            return False
        if head is None:
            return None
        name, rest = head.values[Slot.NAME], self._held[head.end :]
        if (is_known or form.is_bare) and name not in self._tools:
            return None
        if not form.head.strip():  # then what follows has to tell a call
            ends = [form.closing] if not self._tools or name in self._tools else []
            follows = [matched([each], rest) for each in (form.key_opening, *ends)]
            if not any(isinstance(each, Found) for each in follows):
                return False if PARTIAL in follows else None
        self._parts.begin_call(name)
        self._types = self._types_of(name)
        self._names = set()
        self._held, self._read = rest, self._read_argument
        return True

    def _types_of(self, name: str) -> dict[str | None, frozenset[str]]:
        try:
            return argument_types(self._tools[name]) if name in self._tools else {}
        except UsageError:
            return {}

    def _read_argument(self) -> bool:
        """An argument comes next, or the end of the call."""
        form = self._form
        rest = self._held.lstrip()
        if self._names and form.comma.strip() and rest.startswith(form.comma.strip()):
            rest = rest.removeprefix(form.comma.strip()).lstrip()
        if not rest:
            return False
        if any(rest.startswith(each) for each in self._ends):
            self._held = rest
            return self._end_call()
        opening = matched([form.key_opening], rest)
        if opening is PARTIAL or any(each.startswith(rest) for each in self._ends):
            return False
        if isinstance(opening, Found):
            self._held, self._read = rest[opening.end :], self._read_key
            return True
        next_tag = rest.find("<", 1)  # nothing stands between arguments
        self._held = rest[next_tag:] if next_tag > 0 else ""
        return next_tag > 0

    def _read_key(self) -> bool:
        end = self._held.find(self._ends[0])
        if 0 <= end < self._held.find(self._form.key_closing.strip()[:1]) % (len(self._held) + 1):
            self._held, self._read = self._held[end:], self._read_argument  # it has no name
            return True
        found = self._key_end()
        if found is None:
            return False
        key, end, types = found
        key = key.strip().strip("\"'")
        self._held = self._held[end:]
        is_new = key not in self._names
        if is_new:
            self._parts.add_arguments(f"{', ' if self._names else '{'}{as_json(key)}: ")
        self._names.add(key)
        known = self._types.get(key) or self._types.get(None)
        if known:
            types = types & known or known
        elif not types:
            types = ANY if self._form.style.quote else TEXT
        self._value = ArgumentValue(self._form, types, is_left_out=not is_new)
        self._read = self._read_value
        return True

    def _key_end(self) -> tuple[str, int, frozenset[str]] | None:
        """Returns the name of the argument, where its value begins, and what types it has by what
        stands before it; none are any. None where that is not known yet."""
        form = self._form
        variants = [(form.key_closing, frozenset[str]())]
        if form.plain_key_closing is not None:
            variants = [(form.key_closing, TEXT), (form.plain_key_closing, ANY - TEXT)]
        first = form.key_closing.split()[0][:1]
        place = self._held.find(first)
        if place < 0:
            return None
        ends = [(matched([text], self._held[place:]), text, types) for text, types in variants]
        for end, text, types in ends:
            if isinstance(end, Found):
                return self._after_key(place, place + end.end, text, types)
        if any(end is PARTIAL for end, _, _ in ends):
            return None
        last = self._held.find(form.key_closing.rstrip()[-1], place)
        return None if last < 0 else self._after_key(place, last + 1, form.key_closing, frozenset())

    def _after_key(
        self, place: int, end: int, closing: str, types: frozenset[str]
    ) -> tuple[str, int, frozenset[str]] | None:
        """Leaves out the space at the end of what closes the name, if it is there."""
        space = closing[len(closing.rstrip()) :]
        if space and not self._form.style.quote:
            if end == len(self._held):
                return None
            end += self._held.startswith(space, end) and len(space)
        return self._held[:place], end, types

    def _read_value(self) -> bool:
        value = self._value
        self._held = value.push(self._held)
        self._tell_value()
        if value.is_complete:
            self._read = self._read_argument
        return value.is_complete

    def _tell_value(self) -> None:
        told, self._value.told = self._value.told, ""
        if not self._value.is_left_out:
            self._parts.add_arguments(told)

    def _end_early(self) -> bool:
        """Ends a value that was not closed before the call was, if it was."""
        place = -1 if self._form.style.quote else self._held.find(self._ends[0])
        if place >= 0:
            self._value.end(self._held[:place])
            self._tell_value()
            self._end_call()
        return place >= 0

    def _end_call(self) -> bool:
        self._parts.add_arguments("}" if self._names else "{}")
        self._read = self._read_end
        return True

    def _read_end(self) -> bool:
        """A call is complete; what the form has after it is left out."""
        form = self._form
        if form.between is not None:
            begun = self._begun(form.between)
            if begun is not None:
                return begun
        closing = matched([form.closing], self._held)
        if closing is PARTIAL:
            return False
        if isinstance(closing, Found):
            self._held = self._held[closing.end :]
            self._read = self._read_rest if form.is_bare else self._read_text
            return True
        rest = self._held.lstrip()
        if end := next((each for each in self._ends if rest.startswith(each)), ""):
            self._held = rest.removeprefix(end)
            return True
        if any(each.startswith(rest) for each in self._ends):
            return False
        self._read = self._read_rest if form.is_bare else self._read_text
        return True
