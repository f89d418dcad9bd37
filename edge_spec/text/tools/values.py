"""Values of arguments that are written as Python, as a model's own literals, or as bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from edge_spec.errors import UsageError
from edge_spec.text.tools.arguments import alternatives, arguments_schema, definitions_of

ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
TEXT = frozenset(("string",))
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}
_BARE = re.compile(r"[^\s,:\[\](){}]+")
_MAX_DIGITS = 4000  # Python refuses to read integers that have more


@dataclass(frozen=True)
class Values:
    """quote: around texts; "" where a text is bare and all else is JSON. A quote of one character
    comes with Python's escapes, a longer one with none. has_python_words: True, False and None are
    written, too."""

    quote: str = ""
    has_python_words: bool = False

    @property
    def is_python(self) -> bool:
        return len(self.quote) == 1

    def written(self, value: Any) -> str:
        if isinstance(value, str):
            return as_json(value) if self.is_python else f"{self.quote}{value}{self.quote}"
        is_word = self.is_python and (value is None or isinstance(value, bool))
        return repr(value) if is_word else as_json(value)

    def meant(self, text: str, types: Collection[str]) -> str:
        """Return as JSON what is written as a value. types: those that its schema allows. A text
        that means no value of these types is the text that it is."""
        if types == TEXT or not types:
            return as_json(text)
        bare = text.strip()
        try:
            value = LiteralReader(bare, self.quote).read() if self.quote else plain_value(bare)
        except (ValueError, RecursionError):
            return as_json(text)
        kind = type_of(value)
        if isinstance(value, str) and "string" not in types:
            return self.meant(value, types) if value != text else as_json(text)
        if kind not in types and not (kind == "integer" and "number" in types):
            is_whole = kind == "number" and "integer" in types and value == int(value)
            if "string" in types and not is_whole:
                return as_json(text)
        return bare if _NUMBER.fullmatch(bare) else as_json(value)


def argument_types(tool: Mapping[str, Any] | None) -> dict[str | None, frozenset[str]]:
    """Return the types that each argument may have by its name, and under None those of others."""
    if tool is None:
        return {}
    try:
        schema = arguments_schema(tool["function"])
    except UsageError:
        return {}
    definitions = definitions_of(schema)
    found: dict[str | None, frozenset[str]] = {}
    for each in alternatives(schema, definitions):
        if not isinstance(each, Mapping):
            continue
        others = each.get("additionalProperties", False)
        for name, value in [*(each.get("properties") or {}).items(), (None, others)]:
            found[name] = found.get(name, frozenset()) | types_of(value, definitions)
    return found


def types_of(schema: Any, definitions: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of what fits a schema; any where that is not plain."""
    found: set[str] = set()
    for each in alternatives(schema, definitions):
        if not isinstance(each, Mapping):
            found |= ANY if each else set()
        elif "const" in each or "enum" in each:
            values = each["enum"] if "enum" in each else [each["const"]]
            found |= set(map(type_of, values))
        else:
            found |= {each["type"]} if each.get("type") in ANY else ANY
    return frozenset(found)


def type_of(value: Any) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"))
    found = next((name for kind, name in kinds if isinstance(value, kind)), None)
    return found or ("null" if value is None else "object" if isinstance(value, dict) else "array")


def plain_value(text: str) -> Any:
    """A value that is written without quotes: JSON, or Python where a template wrote that."""
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
        if self._text[self._place :].strip():
            raise ValueError("text after a value")
        return value

    def _value(self) -> Any:
        for quote in self._quotes:
            if self._take(quote):
                return self._until(quote)
        for opening, closing in ("[]", "()"):
            if self._take(opening):
                return [self._value() for _ in self._items(closing)]
        if self._take("{"):
            return dict(self._member() for _ in self._items("}"))
        bare = _BARE.match(self._text, self._place)
        if bare is None:
            raise ValueError("no value")
        self._place = bare.end()
        return self._bare_value(bare.group())

    def _items(self, closing: str) -> Any:
        """Yield for each item of an array or an object, which is then read."""
        if self._take(closing):
            return
        while True:
            yield
            has_comma = self._take(",")
            if self._take(closing):
                return
            if not has_comma:
                raise ValueError("no comma")

    def _member(self) -> tuple[str, Any]:
        name = self._value()
        if not self._take(":"):
            raise ValueError("no colon")
        return name if isinstance(name, str) else as_json(name), self._value()

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
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1
        found = self._text.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _bare_value(self, text: str) -> Any:
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _NUMBER.fullmatch(text):
            return json.loads(text, parse_int=_integer)
        if not self._has_words:
            raise ValueError("a word")
        return text


_HEX = "[0-9a-fA-F]"
_PAIR = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # one letter
_ESCAPE = re.compile(rf"\\({_PAIR}|u{_HEX}{{4}}|x{_HEX}{{2}}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def ends_in_escape(text: str) -> bool:
    """Return True if a quote after this text is a part of it."""
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
