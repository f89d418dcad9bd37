"""Writes forms as a JSON Schema of which llguidance holds every keyword: typed parts, anyOf, and
references that stand alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any

from edge_spec.text.json_schema.document import Document, Node
from edge_spec.text.json_schema.forms import EVERYTHING, Arrays, Forms, Objects, Together, together
from edge_spec.text.json_schema.numbers import number_schemas
from edge_spec.text.json_schema.reader import Reader
from edge_spec.text.json_schema.scalars import Numbers, Plain, Strings
from edge_spec.text.json_schema.text_patterns import fits, other_than, pattern_of

MAX_PARTS = 5000  # that are written
MAX_ITEMS = 1000  # of an array, each of which is a part of the grammar
MAX_LENGTH = 100_000  # of a string
_MAX_CHOICES = 128  # of members of an object


class Writer:
    """Writes each combination of parts once, under a name, so that recursion ends."""

    def __init__(self, document: Document, reader: Reader) -> None:
        self._document = document
        self._reader = reader
        self._names: dict[tuple[int, ...], Any] = {}
        self._waiting: list[tuple[str, Together, Forms]] = []
        self.definitions: dict[str, Any] = {}

    def written(self, parts: Together, forms: Forms | None = None) -> Any:
        """A schema, or a reference to one of the definitions. forms: those of the parts."""
        parts = together(self._resolved(part) for part in parts)
        key = tuple(id(part.schema) for part in parts)
        if forms is None and key in self._names:
            return self._names[key]
        found = self._reader.forms(parts) if forms is None else forms
        if found == EVERYTHING:
            return True
        if not any(isinstance(form, (Arrays, Objects)) for form in found):
            self._names[key] = _any_of(self._scalars(parts, found))
            return self._names[key]
        name = str(len(self.definitions))
        if len(self.definitions) == MAX_PARTS:
            self._document.wrong("", f"more than {MAX_PARTS} parts, written out,")
        self.definitions[name] = False
        self._waiting.append((name, parts, found))
        self._names[key] = {"$ref": f"#/$defs/{name}"}
        return self._names[key]

    def whole(self, parts: Together, forms: Forms | None = None) -> Any:
        """What `written` returns, with all definitions that it needs."""
        root = self.written(parts, forms)
        while self._waiting:
            name, parts, found = self._waiting.pop()
            schemas = [*self._scalars(parts, found), *self._others(parts, found)]
            self.definitions[name] = _any_of(schemas)
        return root

    def _resolved(self, part: Node) -> Node:
        """What a part stands for that is a reference alone."""
        for _ in range(100):
            if list(self._document.given(part)) != ["$ref"]:
                break
            part = self._document.target(part)
        return part

    def _scalars(self, parts: Together, forms: Forms) -> list[Any]:
        node = parts[0] if parts else self._document.root
        found: list[Any] = []
        for form in forms:
            if isinstance(form, Plain):
                is_both = len(form.values) == 2
                found.append({"type": "boolean"} if is_both else {"const": form.values[0]})
            elif isinstance(form, Numbers):
                found += number_schemas(self._document, node, form)
            elif isinstance(form, Strings):
                found.append(_string(form))
        return found

    def _others(self, parts: Together, forms: Forms) -> list[Any]:
        node = parts[0] if parts else self._document.root
        found: list[Any] = []
        for form in forms:
            if isinstance(form, Arrays):
                found += self._array(node, form)
            elif isinstance(form, Objects):
                found += self._object(node, form)
        return found

    # Arrays

    def _array(self, node: Node, form: Arrays) -> list[Any]:
        least, most = form.min_items, form.max_items
        asked: dict[int, list[Node]] = {}
        for part, count in form.contained:  # the first items are those that are asked for
            start = len(asked)
            asked.update({index: [part] for index in range(start, start + min(count, MAX_ITEMS))})
        least = max(least, len(asked))
        rest = together(part for source in form.sources for part in source.rest)
        if form.is_unique:
            most = self._unique(node, form, rest, most)
        if least > MAX_ITEMS:
            self._document.wrong(node.path, f"an array of more than {MAX_ITEMS} items")
        if most is not None and most < least:
            return []
        num_first = max(form.num_first, len(asked))
        num_first = num_first if most is None else min(num_first, most)
        first = [
            self.written(together([*form.item(index), *asked.get(index, ())]))
            for index in range(num_first)
        ]
        schema: dict[str, Any] = {"type": "array"}
        if first:
            schema["prefixItems"] = first
        items = self.written(rest)
        if items is not True:
            schema["items"] = items
        if least:
            schema["minItems"] = least
        if most is not None:
            schema["maxItems"] = min(most, MAX_ITEMS)
        return [schema]

    def _unique(self, node: Node, form: Arrays, rest: Together, most: int | None) -> int | None:
        """uniqueItems is passed over, but for how many items there may be."""
        if most is not None and most <= 1:
            return most
        self._document.pass_over(node, "uniqueItems", "items may be alike")
        count = _num_values(self._reader.forms(rest))
        if count is None or form.num_first:
            return most
        return count if most is None else min(most, count)

    # Objects

    def _object(self, node: Node, form: Objects) -> list[Any]:
        members = {name: self.written(form.member(name)) for name in form.known}
        schema: dict[str, Any] = {"type": "object", "properties": members}
        if not form.is_closed:
            members.update({name: False for name in form.forbidden if name not in members})
        patterns = self._patterns(form)
        if patterns:
            schema["patternProperties"] = patterns
        others = form.others
        schema["additionalProperties"] = self.written(others)
        if form.names:
            self._hold_names(node, form, schema)
        if form.required:
            schema["required"] = list(form.required)
        if any(members.get(name) is False for name in form.required):
            return []
        return self._counted(node, form, schema)

    def _patterns(self, form: Objects) -> dict[str, Any]:
        found: dict[str, list[Node]] = {}
        for source in form.sources:
            for pattern in source.patterns:
                found.setdefault(pattern, [])
        for pattern, parts in found.items():
            for source in form.sources:
                parts += source.patterns.get(pattern, source.others or ())
        return {pattern: self.written(together(parts)) for pattern, parts in found.items()}

    def _hold_names(self, node: Node, form: Objects, schema: dict[str, Any]) -> None:
        """propertyNames: those that are known become members, else they are a pattern."""
        strings = [f for f in self._reader.forms(form.names) if isinstance(f, Strings)]
        members = schema["properties"]
        for name in members:
            if not any(fits(name, each) for each in strings):
                members[name] = False
        if schema["additionalProperties"] is False and "patternProperties" not in schema:
            return
        if "patternProperties" in schema:
            self._document.cannot_hold(node, "propertyNames", "beside patternProperties")
            return
        others = schema.pop("additionalProperties")
        schema["additionalProperties"] = False
        patterns = [pattern_of(each) for each in strings if each.values is None]
        for name in [name for each in strings for name in each.values or ()]:
            members.setdefault(name, others)
        if None in patterns:
            self._document.cannot_hold(node, "propertyNames", "more than one pattern or length")
            schema["additionalProperties"] = others
        elif patterns:
            schema["patternProperties"] = {"|".join(f"(?:{each})" for each in patterns): others}

    def _counted(self, node: Node, form: Objects, schema: dict[str, Any]) -> list[Any]:
        """minProperties and maxProperties: llguidance counts members that have no names."""
        least, most = form.min_members, form.max_members
        members: dict[str, Any] = schema["properties"]
        required = schema.get("required", [])
        optional = [n for n, each in members.items() if n not in required and each is not False]
        is_open = schema["additionalProperties"] is not False or "patternProperties" in schema
        least = 0 if least <= len(required) else least
        if most is not None and not is_open and most >= len(required) + len(optional):
            most = None
        if not least and most is None:
            return [schema]
        if least > 1 and is_open:
            self._document.pass_over(node, "minProperties", "names may be alike")
        if not optional:
            if not is_open and least:
                return []
            return [{**schema, **_counts(least, most)}]
        sizes = range(max(least - len(required), 0), len(optional) + 1)
        if most is None:
            sizes = sizes[:1]
        else:
            sizes = range(sizes.start, min(most - len(required), len(optional)) + 1)
        num_choices = sum(comb(len(optional), size) for size in sizes)
        if len(optional) > 40 or not 0 < num_choices <= _MAX_CHOICES:
            keyword = "minProperties" if least else "maxProperties"
            self._document.cannot_hold(node, keyword, "there are too many choices of members")
            return [schema]
        subsets = [each for size in sizes for each in combinations(optional, size)]
        return [_chosen(schema, optional, each, is_exact=most is not None) for each in subsets]


def _chosen(
    schema: Mapping[str, Any], optional: Sequence[str], chosen: Iterable[str], *, is_exact: bool
) -> dict[str, Any]:
    """The object with the chosen members, and, if `is_exact`, none but these and required ones."""
    kept = set(chosen)
    members = dict(schema["properties"])
    if is_exact:
        members.update({name: False for name in optional if name not in kept})
    required = [*schema.get("required", []), *(name for name in optional if name in kept)]
    others = {"additionalProperties": False} if is_exact else {}
    found = {**schema, "properties": members, "required": required, **others}
    if is_exact:
        found.pop("patternProperties", None)
    return found


def _counts(least: int, most: int | None) -> dict[str, int]:
    found = {"minProperties": min(least, MAX_ITEMS)} if least else {}
    return found if most is None else {**found, "maxProperties": min(most, MAX_ITEMS)}


def _any_of(schemas: Sequence[Any]) -> Any:
    """One of the schemas."""
    left = [schema for schema in schemas if schema is not False]
    if True in [schema is True for schema in left]:
        return True
    return False if not left else left[0] if len(left) == 1 else {"anyOf": left}


def _string(form: Strings) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if form.values is not None:
        parts.append({"enum": list(form.values)})
    patterns = [*form.patterns]
    if form.excluded and form.values is None:
        patterns.append(other_than(form.excluded))
    bounds: dict[str, Any] = {"minLength": form.min_length} if form.min_length else {}
    if form.max_length is not None:
        bounds["maxLength"] = min(form.max_length, MAX_LENGTH)
    if form.values is None:
        parts.append({"type": "string", **bounds})
    parts += [{"type": "string", "pattern": pattern} for pattern in patterns]
    parts += [{"type": "string", "format": name} for name in form.formats]
    if len(parts) > 1 and parts[0] == {"type": "string"}:
        parts = parts[1:]
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def _num_values(forms: Forms) -> int | None:
    """How many values there are, where they are listed."""
    counts: list[int] = []
    for form in forms:
        if isinstance(form, (Arrays, Objects)) or form.values is None:
            return None
        counts.append(len(form.values))
    return sum(counts)
