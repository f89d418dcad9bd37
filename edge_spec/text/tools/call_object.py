"""Reads JSON objects that come in pieces."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from enum import Enum, auto

from edge_spec.text.tools.value_literal import ends_in_escape

_SPACE = " \t\r\n"
_AFTER = ",}]<" + _SPACE  # a number or a word
_CLOSING = {"{": "}", "[": "]"}


class ValueEnd:
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
        """Returns how many characters of `piece` belong to the value."""
        for place, character in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
                if not (self._in_string or self._open):
                    self.is_complete = True
                    return place + 1
            elif character == '"' and not self._is_word:
                self._in_string = True
            elif character in _CLOSING and not self._is_word:
                self._open.append(_CLOSING[character])
            elif not self._open and character in _AFTER:
                self.is_complete = True
                return place
            elif character in "}]":
                self._open.pop()
                if not self._open:
                    self.is_complete = True
                    return place + 1
            elif character == "<":
                self.is_complete = True
                self.missing = "".join(reversed(self._open))
                return place
            else:
                self._is_word = not self._open
        return len(piece)


class Role(Enum):
    """What a member of a call says."""

    NAME = auto()
    ARGUMENTS = auto()
    ID = auto()
    OTHER = auto()


class _At(Enum):
    OBJECT = auto()  # before the object
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    INSIDE = auto()  # a value
    COMMA = auto()
    END = auto()
    BROKEN = auto()  # it is no JSON object, or none of a call


class CallObject:
    """Reads a call that is a JSON object, such as {"name": "f", "arguments": {...}}, whatever the
    order of its members. `arguments` is what is known of them and has not been taken."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        is_keyed: bool = False,
        *,
        is_strict: bool = False,
        names: Collection[str] = (),
    ) -> None:
        """roles: of members by their names. is_keyed: the only member is named as the function,
        its value is the arguments. is_strict: another member, or arguments before the name, tell
        that this is no call. names: another one tells so, too; empty where any will do."""
        self.name: str | None = None
        self.id: str | None = None
        self.arguments = ""
        self.has_arguments = False
        self._roles = roles
        self._is_keyed = is_keyed
        self._is_strict = is_strict
        self._names = names
        self._at = _At.OBJECT
        self._text = ""  # of a key, or of a value that is known when it is complete
        self._role: Role | None = None
        self._value = ValueEnd()
        self._streams = False

    @property
    def is_complete(self) -> bool:
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        return self._at is _At.BROKEN

    def push(self, piece: str) -> int:
        """Returns how many characters of `piece` belong to the object."""
        place = 0
        while place < len(piece) and self._at not in (_At.END, _At.BROKEN):
            if self._at is _At.INSIDE:
                place += self._read_value(piece[place:])
            else:
                self._read(piece[place])
                place += not self.is_broken
        return place

    def _read(self, character: str) -> None:
        """Reads one character outside of values."""
        if self._at is _At.KEY and self._text:
            self._text += character
            if character == '"' and not ends_in_escape(self._text[:-1]):
                self._begin_member()
        elif character in _SPACE:
            pass
        elif self._at is _At.OBJECT and character == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and character == '"':
            self._text = character
        elif self._at is _At.KEY and character == "{" and self.name is None:
            pass  # some templates show calls in two pairs of braces
        elif self._at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE and character not in ",:}]":
            self._begin_value(character)
        elif self._at is _At.COMMA and character == ",":
            self._at, self._text = _At.KEY, ""
        elif self._at in (_At.COMMA, _At.KEY) and character == "}":
            self._at = _At.END
        else:
            self._at = _At.BROKEN

    def _begin_member(self) -> None:
        try:
            key = json.loads(self._text)
        except ValueError:
            self._at = _At.BROKEN
            return
        self._at, self._text = _At.COLON, ""
        if self._is_keyed:
            self._role = Role.ARGUMENTS if self.name is None else None
            self.name = self.name or key
        else:
            self._role = self._roles.get(key)
            is_early = self._role is Role.ARGUMENTS and self.name is None
            if self._is_strict and (self._role is None or is_early):
                self._at = _At.BROKEN

    def _begin_value(self, character: str) -> None:
        self._value = ValueEnd()
        self._at, self._text = _At.INSIDE, ""
        is_of_arguments = self._role is Role.ARGUMENTS and not self.has_arguments
        self._streams = is_of_arguments and character == "{"
        self.has_arguments |= is_of_arguments
        if is_of_arguments:
            self.arguments = ""
        elif self._role is Role.ARGUMENTS:
            self._role = None
        self._read_value(character)

    def _read_value(self, piece: str) -> int:
        length = self._value.find(piece)
        self._keep(piece[:length])
        if self._value.is_complete:
            self._keep(self._value.missing)
            self._end_value()
        return length

    def _keep(self, text: str) -> None:
        if self._streams:
            self.arguments += text
        elif self._role is not None:
            self._text += text

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._role is None or self._streams:
            self._streams = False
            return
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            value = None
        if self._role is Role.ARGUMENTS:
            self.arguments += _arguments_text(value, self._text)
        elif self._role is Role.NAME:
            if isinstance(value, str) and (not self._names or value in self._names):
                self.name = value
            else:
                self._at = _At.BROKEN
        elif self._role is Role.ID and isinstance(value, str):
            self.id = value


def _arguments_text(value: object, text: str) -> str:
    """Returns arguments that are no object as one, if they mean one: null, or JSON in a string."""
    if value is None and text.strip() in ("null", '""', ""):
        return "{}"
    if isinstance(value, str):
        return value if value.strip() else "{}"
    return text
