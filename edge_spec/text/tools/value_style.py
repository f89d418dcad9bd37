"""How values stand in calls whose arguments are no JSON: written, and read as JSON again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from edge_spec.text.tools.value_literal import (
    NUMBER,
    LiteralReader,
    as_json,
    plain_value,
)

ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


@dataclass(frozen=True)
class ValueStyle:
    """quote: stands around texts; "" where a text is written as it is and all else as JSON. A quote
    of one character comes with Python's escapes, a longer one with none. comma, colon: within
    arrays and objects. wrap: what stands around texts with characters that a tag may begin with.
    has_python_words: True, False and None are written, too.
    """

    quote: str = ""
    comma: str = ", "
    colon: str = ": "
    wrap: tuple[str, str] = ("", "")
    has_python_words: bool = False

    @property
    def is_python(self) -> bool:
        return len(self.quote) == 1

    def written(self, value: Any) -> str:
        if not self.quote:
            return self._raw(value) if isinstance(value, str) else as_json(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            members = (f"{self.key(name)}{self.colon}{self.written(value[name])}" for name in value)
            return f"{{{self.comma.join(members)}}}"
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.written, value))}]"
        return repr(value) if self.is_python else as_json(value)

    def text(self, value: str) -> str:
        return as_json(value) if self.is_python else f"{self.quote}{value}{self.quote}"

    def key(self, name: str) -> str:
        """Returns the name of an object's member."""
        return as_json(name) if self.is_python else name

    def _raw(self, text: str) -> str:
        opening, closing = self.wrap if re.search(r"[<&\n]", text) else ("", "")
        return f"{opening}{text}{closing}"

    def meant(self, text: str, types: Collection[str]) -> str:
        """Returns as JSON what stands as a value. types: those that its schema allows."""
        return _typed(text, types, self._parsed)

    def _parsed(self, text: str) -> Any:
        """Raises ValueError for what is no value."""
        return LiteralReader(text, self.quote).read() if self.quote else plain_value(text)


def types_of(schema: Any, definitions: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types of what fits a part of a schema as it is held."""
    return frozenset(_types(schema, definitions, set()))


def _types(schema: Any, definitions: Mapping[str, Any], seen: set[str]) -> set[str]:
    if isinstance(schema, bool):
        return set(ANY) if schema else set()
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen:
            return set()
        return _types(definitions[name], definitions, seen | {name})
    for keyword in ("anyOf", "allOf"):
        if keyword in schema:
            found = (_types(each, definitions, seen) for each in schema[keyword])
            return set().union(*found)
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return {type_of(value) for value in values}
    return {schema["type"]}


def type_of(value: Any) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"))
    found = next((name for kind, name in kinds if isinstance(value, kind)), None)
    return found or ("null" if value is None else "object" if isinstance(value, dict) else "array")


def _typed(text: str, types: Collection[str], parsed: Callable[[str], Any]) -> str:
    """What means no value of these types is the text that it is."""
    if types == {"string"} or not types:
        return as_json(text)
    bare = text.strip()
    try:
        value = parsed(bare)
    except (ValueError, RecursionError):
        return as_json(text)
    kind = type_of(value)
    if isinstance(value, str) and "string" not in types:
        return _typed(value, types, parsed) if value != text else as_json(text)
    if kind not in types and not (kind == "integer" and "number" in types):
        is_whole = kind == "number" and "integer" in types and value == int(value)
        if "string" in types and not is_whole:
            return as_json(text)
    return bare if NUMBER.fullmatch(bare) else as_json(value)
