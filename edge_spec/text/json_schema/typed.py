"""Reads the keywords of a schema that are about one kind of value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from edge_spec.text.json_schema import formats
from edge_spec.text.json_schema.document import Document, Node
from edge_spec.text.json_schema.forms import (
    Arrays,
    Form,
    Forms,
    Items,
    Members,
    Objects,
    Together,
    together,
)
from edge_spec.text.json_schema.negation import FORBIDDEN, MEMBERS
from edge_spec.text.json_schema.patterns import UnknownPatternError, as_rust, is_found
from edge_spec.text.json_schema.scalars import Numbers, Plain, Strings, exact, is_number
from edge_spec.text.json_schema.shapes import TYPES

_NAMING = ("additionalProperties", "patternProperties", "properties")
_GREATEST = 10**300


def typed(document: Document, node: Node) -> Forms:
    """The forms of each type that the schema allows, as far as keywords of types say."""
    return _Typed(document, node).forms()


class _Typed:
    def __init__(self, document: Document, node: Node) -> None:
        self._document = document
        self._node = node
        self._given = document.given(node)

    def forms(self) -> Forms:
        makers: dict[str, Callable[[], Form | None]] = {
            "null": lambda: Plain((None,)),
            "boolean": lambda: Plain((True, False)),
            "number": lambda: self._numbers(is_whole=False),
            "integer": lambda: self._numbers(is_whole=True),
            "string": self._strings,
            "array": self._arrays,
            "object": self._objects,
        }
        found = [makers[each]() for each in self._types()]
        return tuple(form for form in found if form is not None)

    def _types(self) -> list[str]:
        asked = self._given.get("type", list(TYPES))
        types = asked if isinstance(asked, list) else [asked]
        return [each for each in dict.fromkeys(types) if each != "integer" or "number" not in types]

    def _numbers(self, *, is_whole: bool) -> Numbers | None:
        least, most = self._number("minimum"), self._number("maximum")
        above, below = self._given.get("exclusiveMinimum"), self._given.get("exclusiveMaximum")
        # Draft 4 has truth values here.
        above = least if above is True else None if above is False else above
        below = most if below is True else None if below is False else below
        form = Numbers(
            is_whole,
            least,
            most,
            None if above is None else _within(above),
            None if below is None else _within(below),
            self._step(),
        )
        name = self._given.get("format")
        if isinstance(name, str) and name in formats.BOUNDS:
            low, high = formats.BOUNDS[name]
            return form.meet(Numbers(True, low, high))
        return form.sound()

    def _number(self, keyword: str) -> float | int | None:
        value = self._given.get(keyword)
        return None if value is None else _within(value)

    def _step(self) -> Fraction | None:
        value = self._number("multipleOf")
        return None if value is None else abs(exact(value))

    def _count(self, keyword: str, default: int | None = 0) -> Any:
        value = self._given.get(keyword)
        return default if value is None else int(value)

    def _strings(self) -> Strings | None:
        form = Strings(self._count("minLength"), self._count("maxLength", None))
        pattern, name = self._given.get("pattern"), self._given.get("format")
        if pattern is not None:
            try:
                form = replace(form, patterns=(as_rust(pattern),))
            except UnknownPatternError as error:
                self._document.cannot_hold(self._node, "pattern", f"{pattern[:100]!r} {error}")
        if isinstance(name, str):
            if name in formats.PATTERNS:
                form = replace(form, patterns=(*form.patterns, f"^(?:{formats.PATTERNS[name]})$"))
            elif name in formats.NATIVE:
                form = replace(form, formats=(name,))
            elif name not in formats.FREE:
                self._pass_over_format(name)
        return form.sound()

    def _pass_over_format(self, name: str) -> None:
        is_for_numbers = name in formats.BOUNDS or name in formats.FREE_NUMBERS
        if not (is_for_numbers and set(self._types()) & {"integer", "number"}):
            self._document.pass_over(self._node, "format", f"{name[:40]} is not known")

    def _arrays(self) -> Arrays | None:
        given, document, node = self._given, self._document, self._node
        first, rest = "prefixItems", "items"
        if isinstance(given.get("items"), list):  # before draft 2020-12
            first, rest = "items", "additionalItems"
        firsts = document.children(node, first) if first in given else []
        if "unevaluatedItems" in given and rest not in given:
            rest = "unevaluatedItems"
        rests = (document.child(node, rest),) if rest in given else ()
        items = Items(tuple(together([each]) for each in firsts), together(rests))
        contained: tuple[tuple[Node, int], ...] = ()
        if "contains" in given:
            at_least = node.schema.get("minContains")
            count = 1 if at_least is None else at_least
            if not is_number(count) or count < 0 or count != int(count):
                document.wrong(f"{node.path}/minContains", "minContains is a whole number")
            contained = ((document.child(node, "contains"), int(count)),)
            if "maxContains" in given:
                document.cannot_hold(node, "maxContains", "items are not counted")
        least, most = self._count("minItems"), self._count("maxItems", None)
        if most is not None and least > most:
            return None
        is_said = items.first or items.rest
        return Arrays(
            (items,) if is_said else (), least, most, given.get("uniqueItems") is True, contained
        )

    def _objects(self) -> Objects | None:
        given, document, node = self._given, self._document, self._node
        properties = {
            name: together([each]) for name, each in document.named(node, "properties").items()
        }
        for name, schema in given.get(MEMBERS, {}).items():
            properties[name] = (Node(schema, node.path),)
        patterns = self._patterns()
        others: Together | None = None
        if "additionalProperties" in given:
            others = together([document.child(node, "additionalProperties")])
        is_naming = not given.keys().isdisjoint(_NAMING)
        names = (document.child(node, "propertyNames"),) if "propertyNames" in given else ()
        is_said = properties or patterns or is_naming or others is not None
        form = Objects(
            (Members(properties, patterns, others, is_naming),) if is_said else (),
            tuple(dict.fromkeys(given.get("required", ()))),
            self._count("minProperties"),
            self._count("maxProperties", None),
            together(names),
            frozenset(given.get(FORBIDDEN, ())),
        )
        return form.meet(Objects())

    def _patterns(self) -> Mapping[str, Together]:
        found: dict[str, Together] = {}
        for pattern, each in self._document.named(self._node, "patternProperties").items():
            try:
                written = as_rust(pattern)
                is_found(written, "")  # it is one
                found[written] = together([each])
            except UnknownPatternError as error:
                told = f"{pattern[:100]!r} {error}"
                self._document.cannot_hold(self._node, "patternProperties", told)
        return found


def _within(value: float) -> float:
    """Whole numbers beyond it are no floats."""
    return max(min(value, _GREATEST), -_GREATEST)
