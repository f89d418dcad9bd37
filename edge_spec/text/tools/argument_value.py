"""Reads the value of one argument, which comes in pieces, and tells it as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edge_spec.text.stop_cutter import overlap
from edge_spec.text.tools.value_literal import as_json, ends_in_escape, unescaped

if TYPE_CHECKING:
    from edge_spec.text.tools.keyed_shape import KeyedShape

TEXT = frozenset(("string",))
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_HEX = "[0-9a-fA-F]"
_WHOLE = re.compile(  # characters and escapes that do not depend on what follows
    rf"(?:[^\\]|\\u(?![dD][89abAB]){_HEX}{{4}}|\\u[dD][89abAB]{_HEX}{{2}}(?=\\u{_HEX}{{4}}|[^\\])"
    rf"|\\x{_HEX}{{2}}|\\[^ux])*",
    re.DOTALL,
)


class ArgumentValue:
    """Reads the value of an argument. told: JSON that is known and has not been taken."""

    def __init__(
        self, form: KeyedShape, types: frozenset[str], *, is_left_out: bool = False
    ) -> None:
        """types: those that it may have. is_left_out: nothing of it is to be told."""
        self.told = ""
        self.is_complete = False
        self.is_left_out = is_left_out
        self._form = form
        self._types = types
        self._streams = False
        self._quote = ""
        self._ending = form.value_closing
        self._literal = _LiteralEnd(form.style.quote)
        self._read = self._read_quoted if form.style.quote else self._read_raw

    def push(self, held: str) -> str:
        """Returns what is left of the held text."""
        return self._read(held)

    def end(self, text: str) -> None:
        """The value ends with this text, of which no part was read."""
        lead = self._form.value_closing[: -len(self._form.value_closing.lstrip())]
        self._finish(text.removesuffix(lead) if lead else text)

    # Values that stand as they are

    def _read_raw(self, held: str) -> str:
        opening, closing = self._form.style.wrap
        if opening and opening.startswith(held) and held != opening:
            return held
        if opening and held.startswith(opening):
            self._ending = f"{closing}{self._form.value_closing}"
            held = held.removeprefix(opening)
        self._begin()
        self._read = self._read_text
        return self._read_text(held)

    def _read_text(self, held: str) -> str:
        core = self._ending.lstrip()
        lead = self._ending[: -len(core)]
        place = held.find(core.rstrip())
        while place >= 0 and "string" not in self._types and _is_in_text(held[:place]):
            place = held.find(core.rstrip(), place + 1)
        if place >= 0:
            self._finish(held[:place].removesuffix(lead) if lead else held[:place])
            return held[place + len(core.rstrip()) :]
        if not self._streams:
            return held
        kept = max(overlap(held, self._ending), overlap(held, core), overlap(held, lead + " "))
        end = self._form.ends[0]  # it may be that the model forgot to close the value
        sure = held[: len(held) - max(kept, overlap(held, lead + end), overlap(held, end))]
        sure, found, _ = sure.partition(end)
        sure = sure.removesuffix(lead) if found and lead else sure
        self.told += as_json(sure)[1:-1]
        return held[len(sure) :]

    # Values in quotes, or in a spelling of their own

    def _read_quoted(self, held: str) -> str:
        held = held.lstrip()
        own = self._form.style.quote
        if not held or (own.startswith(held) and held != own):
            return held
        quotes = dict.fromkeys((own, '"', "'"))
        self._quote = next((each for each in quotes if held.startswith(each)), "")
        if not self._quote:
            self._read = self._read_literal
            return self._read_literal(held)
        self._begin()
        self._read = self._read_until_quote
        return self._read_until_quote(held.removeprefix(self._quote))

    def _read_until_quote(self, held: str) -> str:
        style, place = self._form.style, 0
        while True:
            found = held.find(self._quote, place)
            after = found + len(self._quote)
            if found < 0:
                return self._tell_quoted(held)
            is_escaped = style.is_python and ends_in_escape(held[:found])
            rest = held[after:].lstrip()
            if not is_escaped and len(self._quote) == 1 and not rest:
                # What follows tells whether it ends the text.
                return self._tell_quoted(held[:found]) + held[found:]
            if not is_escaped and (len(self._quote) > 1 or rest[0] in ",)}]<"):
                self._finish(self._unescaped(held[:found]))
                return held[after:]
            place = after

    def _tell_quoted(self, held: str) -> str:
        if not self._streams:
            return held
        sure = held[: len(held) - overlap(held, self._quote)]
        whole = _WHOLE.match(sure) if len(self._quote) == 1 else None
        sure = whole.group() if whole else sure
        self.told += as_json(self._unescaped(sure))[1:-1]
        return held[len(sure) :]

    def _read_literal(self, held: str) -> str:
        end = self._literal.find(held)
        if end is None:
            return held
        self._finish(held[:end])
        return held[end:]

    def _unescaped(self, text: str) -> str:
        return unescaped(text) if len(self._quote) == 1 else text

    def _begin(self) -> None:
        self._streams = self._types == TEXT or (bool(self._quote) and "string" in self._types)
        if self._streams:
            self.told += '"'

    def _finish(self, text: str) -> None:
        if self._streams:
            self.told += f'{as_json(text)[1:-1]}"'
        elif self._quote:
            self.told += self._form.style.meant(as_json(text), self._types)
        else:
            self.told += self._form.style.meant(text, self._types)
        self.is_complete = True


class _LiteralEnd:
    """Finds the end of an array, an object or a word in a text that grows."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._place = 0
        self._open: list[str] = []  # what closes the arrays and objects that are open
        self._within = ""  # what closes the text that is open

    def find(self, text: str) -> int | None:
        """Returns where it ends; None if that is not known yet."""
        while self._place < len(text):
            rest = text[self._place : self._place + len(self._quote)]
            if self._quote.startswith(rest) and len(rest) < len(self._quote):
                return None  # it may be a quote
            is_end, length = self._step(rest, text[self._place])
            if is_end:
                return self._place + length
            self._place += length
        return None

    def _step(self, rest: str, character: str) -> tuple[bool, int]:
        """Returns whether it ends with the next characters, and how many these are."""
        if self._within:
            if character == "\\" and len(self._within) == 1:
                return False, 2
            if not rest.startswith(self._within):
                return False, 1
            length, self._within = len(self._within), ""
            return False, length
        if rest == self._quote:
            self._within = self._quote
            return False, len(self._quote)
        if not self._open and character in ",)}]<":
            return True, 0
        if self._open and character in "\"'":
            self._within = character
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
            return not self._open, 1
        return False, 1


def _is_in_text(text: str) -> bool:
    """Says whether JSON that begins so is within a text."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
