"""Reads values that are written as JSON, as Python's literals, or with quotes of a model's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}
_BARE = re.compile(r"[^\s,:\[\](){}]+")
_MAX_DIGITS = 4000  # Python refuses to read integers that have more


def plain_value(text: str) -> Any:
    """A value that stands without quotes: JSON, or Python where a template wrote that."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text, parse_constant=_no_value, parse_int=_integer)
    except ValueError:
        if text[:1] not in ("[", "{", "("):
            raise
    return LiteralReader(text, "'", has_words=False).read()


def _no_value(name: str) -> Any:
    raise ValueError(name)


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("too many digits")
    return int(text)


class LiteralReader:
    """Reads a value in Python's spelling, or in one with quotes of its own and bare names."""

    def __init__(self, text: str, quote: str, *, has_words: bool = True) -> None:
        """has_words: texts without quotes are read, too."""
        self._text = text
        self._has_words = has_words
        self._place = 0
        self._quotes = tuple(dict.fromkeys((quote, '"', "'")))

    def read(self) -> Any:
        value = self._value()
        self._space()
        if self._place < len(self._text):
            raise ValueError("text after a value")
        return value

    def _value(self) -> Any:
        self._space()
        for quote in self._quotes:
            if self._take(quote):
                return self._until(quote)
        if self._take("["):
            return self._items("]")
        if self._take("("):
            return self._items(")")
        if self._take("{"):
            return self._members()
        bare = _BARE.match(self._text, self._place)
        if bare is None:
            raise ValueError("no value")
        self._place = bare.end()
        return _bare_value(bare.group(), self._has_words)

    def _items(self, closing: str) -> list[Any]:
        items: list[Any] = []
        while not self._ends(closing, bool(items)):
            items.append(self._value())
        return items

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._ends("}", bool(members)):
            name = self._value()
            self._space()
            if not self._take(":"):
                raise ValueError("no colon")
            members[name if isinstance(name, str) else as_json(name)] = self._value()
        return members

    def _ends(self, closing: str, is_begun: bool) -> bool:
        self._space()
        has_comma = is_begun and self._take(",")
        self._space()
        if self._take(closing):
            return True
        if is_begun and not has_comma:
            raise ValueError("no comma")
        return False

    def _until(self, quote: str) -> str:
        start = self._place
        while True:
            end = self._text.find(quote, self._place)
            if end < 0:
                raise ValueError("no end of a text")
            self._place = end + len(quote)
            text = self._text[start:end]
            if len(quote) > 1:
                return text
            if not ends_in_escape(text):
                return unescaped(text)

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _space(self) -> None:
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1


def _bare_value(text: str, is_word: bool) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if NUMBER.fullmatch(text):
        return json.loads(text, parse_int=_integer)
    if not is_word:
        raise ValueError("a word")
    return text


_HEX = "[0-9a-fA-F]"
_PAIR = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # one letter
_ESCAPE = re.compile(rf"\\({_PAIR}|u{_HEX}{{4}}|x{_HEX}{{2}}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def ends_in_escape(text: str) -> bool:
    """Says whether a quote after this text is a part of it."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def unescaped(text: str) -> str:
    return _ESCAPE.sub(_character, text) if "\\" in text else text


def _character(found: re.Match[str]) -> str:
    escape = found[1]
    if escape[0] == "u" and len(escape) > 1:
        text: str = json.loads(f'"\\{escape}"')
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if escape[0] == "x" and len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPED.get(escape, escape if escape in "\\'\"/" else "\\" + escape)


def as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
