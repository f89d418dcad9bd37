"""Rules of Lark for values that are written in another style than JSON's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from edge_spec.text.tools.arguments import in_style
from edge_spec.text.tools.value_style import ValueStyle

ANYTHING = "/(.|\\n)*/"
_NAME = r"/[a-zA-Z_][a-zA-Z0-9_.-]*/"  # of a member that no schema names
_SINGLE = r"/'([^'\\]|\\[nrtbf\\'\"])*'/"
_NOTHING = '""'
Entry = Callable[[str, Any], str]


def literal(text: str) -> str:
    """Returns what the answer has in these letters or as special tokens; "" for no text."""
    return f"@{json.dumps(text, ensure_ascii=False)}" if text else ""


class ValueRules:
    """Collects the rules of one function's values. Schemas are as `held_schema` gives them."""

    def __init__(
        self, style: ValueStyle, prefix: str, definitions: Mapping[str, Any], closing: str
    ) -> None:
        """prefix: of the names of all rules. closing: stands after the value of an argument."""
        self.rules: list[str] = []
        self._style = style
        self._prefix = prefix
        self._definitions = definitions
        self._closing = closing
        self._count = 0
        self._named: dict[str, str] = {}  # rules of definitions, and of what may be anything

    def argument(self, schema: Any) -> str:
        """Returns the expression of an argument's value and of what closes it."""
        if self._style.quote:
            return f"{self.value(schema)} {literal(self._closing)}"
        return self._one_of(self._raw(each) for each in self._alternatives(schema))

    def members(self, schema: Any, entry: Entry, comma: str, *, is_sorted: bool = False) -> str:
        """Returns the expression of an object's members, without what stands around them. entry:
        gives that of a member by the expression of its name and its schema."""
        found = [
            self._members(each, entry, comma, is_sorted=is_sorted)
            for each in self._alternatives(schema)
        ]
        return self._one_of(found)

    def value(self, schema: Any) -> str:
        """Returns the expression of a value in quotes, or of an array or object of such."""
        if schema is True:
            return self._once("any", _ANYTHING)
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self._once(name, self._definitions[name])
        if "anyOf" in schema:
            return self._one_of(map(self.value, schema["anyOf"]))
        kind = schema.get("type")
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            comma, colon = self._style.comma, self._style.colon

            def entry(name: str, value: Any) -> str:
                name = f'"\\"" {name} "\\""' if self._style.is_python else name
                return f"{name} {literal(colon)} {self.value(value)}"

            return f'"{{" {self._members(schema, entry, comma)} "}}"'
        return self._scalar(schema)

    def apart(self, schema: Any) -> tuple[list[Any], list[Any]]:
        """Returns the schemas that a schema chooses from: those of texts, and others."""
        found = self._alternatives(schema)
        if True in found:
            return [{"type": "string"}], [{"type": name} for name in _KINDS if name != "string"]
        texts = [each for each in found if _is_text(each)]
        return texts, [each for each in found if each not in texts]

    # Values that are written as they are

    def _raw(self, schema: Any) -> str:
        if schema is True:
            return self._text({"type": "string"})
        if _is_text(schema):
            return self._text(schema)
        if schema.get("type") in ("array", "object"):
            name = self._new()
            held = {**schema, "$defs": dict(self._definitions)}
            self.rules.append(f"{name}: %json {in_style(held)}")
            return f"{name} {literal(self._closing)}"
        return f"{self._scalar(schema)} {literal(self._closing)}"

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Returns a text and what closes it: it ends where that comes first."""
        closing, core = self._closing, self._closing.strip()
        if "enum" in schema:
            return self._listed(closing, core, schema["enum"])
        patterns = list(_patterns(schema))
        if not self._style.wrap[0]:
            return self._until(closing, core, patterns)
        opening, end = self._style.wrap
        plain = self._until(closing, core, [*patterns, r"[^<&\n]*"])
        return f"({plain} | {literal(opening)} {self._until(end + closing, end, patterns)})"

    def _listed(self, closing: str, core: str, texts: Sequence[str]) -> str:
        """Returns one of those texts that have no `core` in them, and its closing."""
        fitting = (json.dumps(each, ensure_ascii=False) for each in texts if core not in each)
        return f"({' | '.join(fitting) or _NOTHING}) {literal(closing)}"

    def _until(self, closing: str, core: str, patterns: Sequence[str]) -> str:
        """Returns a text that matches the patterns and has no `core` in it, and its closing."""
        name = self._new()
        allowed = " & ".join(f"/{each}/" for each in patterns) or ANYTHING
        terminal = name.upper()
        escaped = regex_of(core)
        self.rules.append(f"{terminal}: {allowed} & ~/(.|\\n)*{escaped}(.|\\n)*/")
        self.rules.append(f"{name}[lazy]: {terminal} {literal(closing)}")
        return name

    # Values in quotes

    def _scalar(self, schema: Mapping[str, Any]) -> str:
        if _is_text(schema):
            return self._quoted(schema)
        is_listed = "const" in schema or "enum" in schema
        if not is_listed and schema["type"] == "boolean":
            return self._words(True, False)
        values = schema.get("enum", [schema.get("const")])
        if is_listed and all(value is None or isinstance(value, bool) for value in values):
            return self._words(*values)
        name = self._new()
        self.rules.append(f"{name}: %json {in_style(schema)}")
        return name

    def _words(self, *values: bool | None) -> str:
        words = [json.dumps(json.dumps(value)) for value in values]
        if self._style.has_python_words:
            words += [json.dumps(repr(value)) for value in values]
        return f"({' | '.join(words)})"

    def _quoted(self, schema: Mapping[str, Any]) -> str:
        quote = self._style.quote
        if not self._style.is_python:
            opening = literal(quote)
            if "enum" in schema:
                return f"{opening} {self._listed(quote, quote, schema['enum'])}"
            return f"{opening} {self._until(quote, quote, list(_patterns(schema)))}"
        name = self._new()
        self.rules.append(f"{name}: %json {in_style(schema)}")
        if schema == {"type": "string"}:
            return f"({name} | {_SINGLE})"
        plain = [text for text in schema.get("enum", ()) if re.fullmatch(r"[^'\\\n]*", text)]
        singles = [json.dumps(f"'{text}'", ensure_ascii=False) for text in plain]
        return f"({' | '.join([name, *singles])})"

    def _array(self, schema: Mapping[str, Any]) -> str:
        """The first items all stand there, or the array is empty."""
        comma, rest = literal(self._style.comma), schema.get("items", True)
        first = [self.value(each) for each in takewhile(bool, schema.get("prefixItems", ()))]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if rest is False or len(first) < len(schema.get("prefixItems", ())):
            most = len(first)
        if most == 0:
            return '"[]"'
        if not first:
            first = [self.value(rest)]
        items = f" {comma} ".join(first)
        if most is None or most > len(first):
            bounds = f"{max(least - len(first), 0)},{'' if most is None else most - len(first)}"
            items += f" ({comma} {self.value(rest)}){{{bounds}}}"
        return f'"[" {items if least else f"({items})?"} "]"'

    # Objects

    def _members(
        self, schema: Mapping[str, Any], entry: Entry, comma: str, *, is_sorted: bool = False
    ) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        names = [name for name, each in properties.items() if each is not False]
        # Where names have patterns, those that the schema lists are the only ones.
        others = "patternProperties" not in schema and schema.get("additionalProperties", False)
        other = "" if others is False else entry(self._other_name(properties), others)
        order = sorted(names) if is_sorted else names
        entries = [(entry(literal(each), properties[each]), each in required) for each in order]
        if not comma:
            parts = [each if must else f"({each})?" for each, must in entries]
            return " ".join([*parts, *([f"({other})*"] if other else [])]) or _NOTHING
        return self._separated(entries, other, literal(comma))

    def _separated(self, entries: Sequence[tuple[str, bool]], other: str, comma: str) -> str:
        """Builds from the end on: what may follow when something has been written, or nothing."""
        after = f"({comma} {other})*" if other else _NOTHING
        first = f"({other} {after})?" if other else _NOTHING
        for each, must in reversed(entries):
            own = f"{comma} {each}"
            follows = self._rule(after)
            after = f"{own if must else f'({own})?'} {follows}"
            first = f"{each} {follows}" if must else f"({each} {follows} | {self._rule(first)})"
        return self._rule(first)

    def _other_name(self, known: Iterable[str]) -> str:
        """Returns the expression of names but these."""
        name = self._new()
        listed = "|".join(map(regex_of, known))
        self.rules.append(f"{name.upper()}: {_NAME}{f' & ~/({listed})/' if listed else ''}")
        return name.upper()

    def _alternatives(self, schema: Any) -> list[Any]:
        """Returns the schemas that a schema chooses from."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._alternatives(self._definitions[schema["$ref"].rpartition("/")[2]])
        if isinstance(schema, Mapping) and "anyOf" in schema:
            return [found for each in schema["anyOf"] for found in self._alternatives(each)]
        return [schema]

    # Rules

    def _once(self, name: str, schema: Any) -> str:
        if name not in self._named:
            self._named[name] = rule = self._new()
            self.rules.append(f"{rule}: {self.value(schema)}")
        return self._named[name]

    def _rule(self, expression: str) -> str:
        if re.fullmatch(r'\w+|""', expression):
            return expression
        name = self._new()
        self.rules.append(f"{name}: {expression}")
        return name

    def _new(self) -> str:
        self._count += 1
        return f"{self._prefix}_{self._count}"

    @staticmethod
    def _one_of(expressions: Iterator[str] | Sequence[str] | map[str]) -> str:
        found = list(dict.fromkeys(expressions))
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"


_KINDS = ("string", "number", "boolean", "null", "array", "object")
_OBJECT = {"type": "object", "additionalProperties": True}
_ANYTHING = {"anyOf": [*({"type": name} for name in _KINDS[:-1]), _OBJECT]}


def _is_text(schema: Mapping[str, Any]) -> bool:
    if "allOf" in schema:
        return True
    values = schema.get("enum")
    return schema.get("type") == "string" or (
        values is not None and all(isinstance(value, str) for value in values)
    )


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields regular expressions that the whole of a text matches. One that is not anchored as a
    whole is none of them: the text is then not held to it."""
    for each in schema.get("allOf", [schema]):
        if "minLength" in each or "maxLength" in each:
            yield f"(.|\\n){{{each.get('minLength', 0)},{each.get('maxLength', '')}}}"
        if "enum" in each:
            yield f"(?:{'|'.join(map(regex_of, each['enum']))})"
        pattern = each.get("pattern")
        whole = None if pattern is None else _whole(pattern)
        if whole is not None:
            yield whole


def _whole(pattern: str) -> str | None:
    """Returns what the whole text matches where the pattern is found in it."""
    if "|" in re.sub(r"\\.|\((?:[^()\\]|\\.|\([^()]*\))*\)|\[[^]]*\]", "", pattern):
        return None
    start = "" if pattern.startswith("^") else "(.|\\n)*"
    is_anchored = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")[: -1 if is_anchored else None]
    if re.search(r"\^|\$", re.sub(r"\\.|\[\^", "", inner)):
        return None
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner)
    end = "" if is_anchored else "(.|\\n)*"
    return f"{start}(?:{escaped}){end}"


def regex_of(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
