"""Prepares people's JSON Schemas for llguidance, whose compiler holds answers to them.

What llguidance holds wrongly or not at all is refused, or passed over, in a line with its place.
Unions become anyOf of whole parts, since objects have no members but those that all of a part
names. llguidance joins what allOf says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any, Literal, NoReturn, get_args
from urllib.parse import unquote

from pydantic import Field, TypeAdapter, ValidationError

from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.text import json_formats as formats

MAX_LEVELS = 600  # of text, with that of references: llguidance runs out of stack at some thousands
MAX_DEPTH = 60  # of parts within each other
MAX_PARTS = 20_000
MAX_PAIRS = 200_000
MAX_ITEMS = 1000  # of an array, each of which is a part of the grammar
MAX_LENGTH = 100_000  # of a string
_GREATEST = 10**15 - 1  # of bounds, which become regular expressions of digits
_EXACT = 2**53  # whole numbers up to it are floats, as which llguidance reads values
_MARGIN = 1e-6  # of a bound that is no value itself
_MAX_STEP = 10_000  # of multipleOf without its point: remainders are counted


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_Type = Literal["null", "boolean", "number", "integer", "string", "array", "object"]
# They say something about values of all types.
_GENERAL = _words("$ref allOf anyOf const enum not nullable oneOf uniqueItems")
# They say nothing about a value, or belong to another keyword.
_ANNOTATIONS = _words(
    "$anchor $comment $defs $dynamicAnchor $id $recursiveAnchor $schema $vocabulary components "
    "contentEncoding contentMediaType default definitions deprecated description discriminator "
    "else example examples externalDocs id markdownDescription maxContains minContains readOnly "
    "strict then title writeOnly xml"
)
_UNHELD = {
    **dict.fromkeys(("if", "not"), "what does not fit a schema is not known"),
    "contains": "items are not told apart",
    **dict.fromkeys(
        ("dependencies", "dependentRequired", "dependentSchemas"),
        "members do not depend on each other",
    ),
    "unevaluatedItems": "say items",
    "unevaluatedProperties": "say additionalProperties",
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "only $ref is followed"),
}


def _is_number(value: Any) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole or (isinstance(value, float) and math.isfinite(value))


_Number = Annotated[float, Field(allow_inf_nan=False)] | int
_Schema = dict[Any, Any] | bool
_MANY = Field(max_length=MAX_PARTS)
# What values keywords have.
_KINDS: tuple[tuple[str, Any], ...] = (
    ("type", _Type | Annotated[list[_Type], Field(min_length=1)]),
    ("enum allOf anyOf oneOf prefixItems", Annotated[list[Any], _MANY]),
    ("const", Any),
    ("required", list[str]),
    ("minimum maximum", _Number),
    ("exclusiveMinimum exclusiveMaximum", _Number | bool),
    ("multipleOf", Annotated[_Number, Field(gt=0)]),
    ("minLength", Annotated[_Number, Field(ge=0, le=MAX_LENGTH, multiple_of=1)]),
    ("minItems", Annotated[_Number, Field(ge=0, le=MAX_ITEMS, multiple_of=1)]),
    (
        "maxItems maxLength minProperties maxProperties",
        Annotated[_Number, Field(ge=0, multiple_of=1)],
    ),
    ("properties", Annotated[dict[Any, Any], _MANY]),
    ("patternProperties", Annotated[dict[Any, Any], Field(max_length=100)]),
    ("items", _Schema | Annotated[list[Any], _MANY]),
    ("additionalItems additionalProperties propertyNames", _Schema),
    ("$ref format pattern", Annotated[str, _MANY]),
    ("nullable uniqueItems", bool),
)
_SHAPES = {each: TypeAdapter(kind) for keywords, kind in _KINDS for each in keywords.split()}


@dataclass(frozen=True)
class HeldSchema:
    """schema: what fits it fits the one that was given, but for what is passed over.
    passed_over: a line each, with keyword and place."""

    schema: dict[str, Any]
    passed_over: tuple[str, ...]


def held_schema(
    schema: Any, *, is_strict: bool = True, is_object: bool = False, name: str = "#"
) -> HeldSchema:
    """Raises UsageError for what is no JSON Schema, what nothing fits, and, if `is_strict`, for a
    keyword that cannot be held.

    is_object: only objects are meant. name: of the schema, in messages.
    """
    writer = _Writer(schema, is_strict, name)
    try:
        return HeldSchema(writer.whole(is_object=is_object), tuple(writer.passed_over))
    except RecursionError:
        writer.wrong("", "too many levels")


class _Writer:
    def __init__(self, schema: Any, is_strict: bool, name: str) -> None:
        self.passed_over: dict[str, None] = {}
        self._schema = schema
        self._is_strict = is_strict
        self._name = name
        self._num_parts = 0
        self._num_pairs = 0  # of what oneOf chooses from
        self._definitions: dict[str, Any] = {}
        # Which part of the schema a definition is, and what is said before and after that.
        self._sources: dict[str, tuple[str, Any, Any]] = {}
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._unions: list[tuple[str, list[Any]]] = []  # members of oneOf

    def whole(self, *, is_object: bool) -> dict[str, Any]:
        root = self._written(self._schema, "")
        if is_object:
            root = self._both(root, {"type": "object"}, "")
            if root is False:
                self.wrong("", "arguments are an object, and no object fits")
        while self._waiting:
            name = self._waiting.pop()
            path, before, after = self._sources[name]
            found = self._both(before, self._written(self._pointed(path), path), path)
            self._definitions[name] = self._both(found, after, path)
        for path, members in self._unions:
            pairs = ((a, b) for n, a in enumerate(members) for b in members[:n])
            if not all(self._are_apart(a, b) for a, b in pairs):
                self._cannot_hold(path, "oneOf", "a value may fit two members; anyOf allows it")
        finite = self._finite()
        root = _finished(root, finite)
        if root is False:
            self.wrong("", "Unsatisfiable schema (nothing fits it)")
        parts = {n: _finished(each, finite) for n, each in self._definitions.items() if n in finite}
        root = {} if root is True else root
        if _num_levels(root, parts) > MAX_LEVELS:
            self.wrong("", f"more than {MAX_LEVELS} levels, with those of references,")
        return {**root, "$defs": parts} if parts else root

    def _finite(self) -> set[str]:
        """The definitions that some value fits, unlike a node that always has another one."""
        users: dict[str, set[str]] = {}
        for name, each in self._definitions.items():
            for used in re.findall(r'"#/\$defs/(\d+)"', json.dumps(each)):
                users.setdefault(used, set()).add(name)
        finite: set[str] = set()
        waiting = list(self._definitions)
        while waiting:
            name = waiting.pop()
            if name not in finite and _finished(self._definitions[name], finite) is not False:
                finite.add(name)
                waiting += users.get(name, ())
        return finite

    # What is wrong

    def wrong(self, path: str, why: str) -> NoReturn:
        raise UsageError(
            f"no answer can have this form: {why} at {self._name}{path}",
            remedy="Correct the schema.",
        )

    def _cannot_hold(self, path: str, keyword: str, why: str) -> None:
        """Passes a keyword over where the schema is not strict."""
        if self._is_strict:
            raise UsageError(
                f"answers cannot be held to {keyword} at {self._name}{path}/{keyword} ({why})",
                remedy="Leave it out, or say strict: false, so that it is passed over.",
            )
        self._pass_over(path, keyword, why)

    def _pass_over(self, path: str, keyword: str, why: str) -> None:
        self.passed_over.setdefault(f"{keyword} at #{path}/{keyword} ({why})")

    def _malformed(self, path: str, keyword: str, why: str) -> None:
        if self._is_strict:
            self.wrong(f"{path}/{keyword}", f"{keyword} {why}")
        self._pass_over(path, keyword, f"{keyword} {why}")

    def _count_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            self.wrong("", f"more than {MAX_PARTS} parts")

    # Parts of the schema

    def _written(self, raw: Any, path: str, depth: int = 0) -> Any:
        """Returns true, false, a reference, anyOf, or keywords, of which allOf has several sets."""
        if isinstance(raw, bool):
            return raw
        if not isinstance(raw, Mapping):
            kind = {str: "a string", list: "a list", type(None): "null"}.get(type(raw), "a number")
            self.wrong(path, f"a schema is an object or a truth value, not {kind}")
        self._count_part()
        if depth > MAX_DEPTH:
            self.wrong("", f"more than {MAX_DEPTH} levels")

        def child(keyword: str, *step: str | int) -> Any:
            value = given[keyword][step[0]] if step else given[keyword]
            return self._written(value, path + _pointer(keyword, *step), depth + 1)

        given = self._checked(raw, path)
        found = self._keywords(given, path, child) if given.get("not", True) else False
        if "enum" in given:
            found = self._both(found, self._listed(given["enum"], path, "enum"), path)
        if "const" in given:
            found = self._both(found, self._listed([given["const"]], path, "const"), path)
        if "$ref" in given:
            found = self._both(found, self._target(given["$ref"], path), path)
        for index in range(len(given.get("allOf", ()))):
            found = self._both(found, child("allOf", index), path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in given:
                members = [
                    self._both(child(keyword, index), _tag(raw, member), path)
                    for index, member in enumerate(given[keyword])
                ]
                members = [self._both(found, member, path) for member in members]
                self._unions += [(path, members)] if keyword == "oneOf" else []
                found = _any_of(members)
        is_null = given.get("nullable") and not {"enum", "const"} & given.keys()
        return _any_of([found, {"type": "null"}]) if is_null else found

    def _checked(self, raw: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """The keywords that say something about a value and can be held. One of null is none:
        programs write so what was not set."""
        given: dict[str, Any] = {}
        for keyword, value in raw.items():
            if keyword in _ANNOTATIONS or (value is None and keyword != "const"):
                continue
            if keyword in ("properties", "patternProperties"):
                value = value or {}  # PHP writes an empty list
            if keyword in ("properties", "patternProperties", "enum", "const", "pattern"):
                self._require_characters(path, keyword, value)
            if keyword == "required" and isinstance(value, bool):  # draft 3, beside a property
                self._pass_over(path, keyword, "it is a list of names")
            elif keyword == "not" and value in ({}, True):  # as zod says that nothing fits
                given[keyword] = False
            elif keyword == "unevaluatedProperties" and not _IN_PLACE & raw.keys():
                given.setdefault("additionalProperties", value)
            elif keyword in _UNHELD:
                self._cannot_hold(path, keyword, _UNHELD[keyword])
            elif keyword in _SHAPES:
                try:
                    _SHAPES[keyword].validate_python(value, strict=True)
                    given[keyword] = value
                except ValidationError as error:
                    self._malformed(path, keyword, f"is malformed: {error.errors()[0]['msg']}")
            elif keyword == "contentSchema":
                self._pass_over(path, keyword, "the text in the string is free")
            elif not str(keyword).startswith("x-"):
                self._pass_over(path, str(keyword), "no keyword of JSON Schema")
        if given.get("uniqueItems"):
            self._pass_over(path, "uniqueItems", "items may be alike")
        return given

    def _require_characters(self, path: str, keyword: str, value: Any) -> None:
        is_named = keyword in ("properties", "patternProperties") and isinstance(value, Mapping)
        try:
            json.dumps(list(value) if is_named else value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self.wrong(f"{path}/{keyword}", "half a character (a surrogate alone)")

    # References

    def _target(self, ref: str, path: str) -> Any:
        if isinstance(self._schema.get("$id"), str):
            ref = ref.removeprefix(self._schema["$id"])
        if not re.match(r"#(/|$)", ref) or self._pointed(ref[1:]) is None:
            self._malformed(path, "$ref", f"{ref[:100]!r} is not in the schema")
            return True
        return self._reference(ref[1:], True, True)

    def _pointed(self, path: str) -> Any:
        found = self._schema
        for step in path.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (LookupError, TypeError, ValueError):
                return None
        return found

    def _reference(self, path: str, before: Any, after: Any) -> Any:
        key = json.dumps([path, before, after])
        if key not in self._names:
            self._count_part()
            name = self._names[key] = str(len(self._definitions))
            self._definitions[name] = True
            self._sources[name] = path, before, after
            self._waiting.append(name)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    # Keywords

    def _keywords(self, given: dict[str, Any], path: str, child: Callable[..., Any]) -> Any:
        if given.keys() <= _GENERAL:
            return True
        types = _types(given)
        schema: dict[str, Any] = {"type": given["type"]} if "type" in given else {}
        if "number" in types or "integer" in types:
            schema |= self._number(given, path)
        if "array" in types:
            schema |= _array(given, child)
        if "object" in types:
            schema |= self._object(given, path, child)
        if "string" not in types:
            return schema
        schema |= self._string(given, path)
        form = formats.PATTERNS.get(given.get("format", ""))
        return schema if form is None else self._both(schema, {"pattern": f"^(?:{form})$"}, path)

    def _number(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        """All bounds become inclusive: llguidance takes some that are left out for values."""
        schema: dict[str, Any] = {}
        limits = formats.BOUNDS.get(given.get("format", "")) if "type" in given else None
        if limits:
            schema["type"] = _listed_types((_types(given) | {"integer"}) - {"number"})
        for side, (keyword, strict, sign) in enumerate(_BOUNDS):
            bounds = [given[keyword]] if keyword in given else []
            beyond = given.get(keyword) if given.get(strict) is True else given.get(strict)
            if beyond is not None and beyond is not False:  # true is draft 4's
                beyond = min(max(beyond, -_GREATEST - 1), _GREATEST + 1)
                is_whole = schema.get("type", given.get("type")) == "integer"
                margin = max(_MARGIN, math.ulp(beyond))
                bounds.append(
                    sign * (math.floor(sign * beyond) + 1) if is_whole else beyond + sign * margin
                )
            bounds += [limits[side]] if limits else []
            tightest = max((sign * each for each in bounds), default=-math.inf)
            if tightest > _GREATEST:
                self._cannot_hold(path, keyword, "a number of more than 15 digits")
            elif bounds:
                schema[keyword] = sign * max(tightest, -_GREATEST)
        if "multipleOf" in given:
            step = shifted = given["multipleOf"]
            while shifted != int(shifted) and shifted < _MAX_STEP:  # as llguidance reads it
                shifted *= 10
            if shifted <= _MAX_STEP or str(int(shifted)).strip("0") == "1":
                schema["multipleOf"] = step
            else:
                self._cannot_hold(path, "multipleOf", "it has too many digits")
        return schema

    def _string(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if given.get("minLength"):
            schema["minLength"] = int(given["minLength"])
        if "maxLength" in given:
            schema["maxLength"] = min(int(given["maxLength"]), MAX_LENGTH)
        if "pattern" in given and (pattern := self._pattern(given["pattern"], path, "pattern")):
            schema["pattern"] = pattern
        name, known = given.get("format", "text"), formats.FREE | formats.PATTERNS.keys()
        if name in formats.NATIVE:
            schema["format"] = name
        elif name not in known and not ("integer" in _types(given) and name in formats.NUMBERS):
            self._pass_over(path, "format", f"{name[:40]} is not known")
        return schema

    def _pattern(self, pattern: str, path: str, keyword: str) -> str | None:
        """Returns it as Rust has it; None if it is passed over."""
        written = _without_lookahead(pattern)
        fault = "a set of characters in a set" if _SETS.search(written) else _fault_of(written)
        if not fault:
            return written
        self._cannot_hold(path, keyword, f"{pattern[:100]!r}: {fault}")
        return None

    def _object(
        self, given: dict[str, Any], path: str, child: Callable[..., Any]
    ) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if "properties" in given:
            schema["properties"] = {name: child("properties", name) for name in given["properties"]}
        if "patternProperties" in given:
            schema["patternProperties"] = {
                written: child("patternProperties", pattern)
                for pattern in given["patternProperties"]
                if (written := self._pattern(pattern, path, "patternProperties"))
            }
        if "additionalProperties" in given:
            schema["additionalProperties"] = child("additionalProperties")
        if given.get("required"):
            schema["required"] = list(dict.fromkeys(given["required"]))
        if "propertyNames" in given:
            schema |= self._names_of(given["propertyNames"], schema, path)
        return schema | self._counts(given, schema, path)

    def _names_of(self, raw: Any, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """propertyNames: those that are listed become members, others are a pattern."""
        for _ in range(MAX_DEPTH):
            if isinstance(raw, Mapping) and isinstance(raw.get("$ref"), str):
                raw = self._pointed(raw["$ref"].removeprefix("#"))
        names = self._written(raw, f"{path}/propertyNames")
        names = self._both(names, {"type": "string"}, path)
        if names == {"type": "string"}:
            return {}
        others = schema.get("additionalProperties", True)
        kinds = names.keys() - {"type"} if isinstance(names, dict) else set()
        closed: dict[str, Any] = {"additionalProperties": False}
        if not (schema.get("properties") or schema.get("patternProperties")):
            if kinds == {"enum"}:
                return {"properties": dict.fromkeys(names["enum"], others), **closed}
            if kinds == {"pattern"}:
                return {"patternProperties": {names["pattern"]: others}, **closed}
            if kinds and kinds <= {"minLength", "maxLength"}:
                length = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
                return {"patternProperties": {f"^(?s:.{{{length}}})$": others}, **closed}
        why = "names are listed, one pattern, or of a length, and no others are named"
        self._cannot_hold(path, "propertyNames", why)
        return {}

    def _counts(self, given: dict[str, Any], schema: dict[str, Any], path: str) -> dict[str, Any]:
        """minProperties and maxProperties: llguidance counts members that have no names."""
        least, most = int(given.get("minProperties", 0)), given.get("maxProperties", math.inf)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        named = {*properties, *required}
        others = schema.get("additionalProperties", not properties or least > len(named))
        is_open = others is not False or bool(schema.get("patternProperties"))
        counts: dict[str, Any] = {}
        if least > len(required):
            counts["minProperties"] = min(least, MAX_ITEMS)
        if most < math.inf and (is_open or most < len(named)):
            counts["maxProperties"] = min(int(most), MAX_ITEMS)
        is_one = least <= len(required) + 1 and most in (math.inf, len(required) + 1)
        if counts and len(named) > len(required) and (is_open or not is_one):
            self._cannot_hold(path, next(iter(counts)), "not all members are required")
            return {}
        if is_open and counts.get("minProperties", 0) > 1:
            self._pass_over(path, "minProperties", "names may be alike")
        return counts

    def _listed(self, values: Sequence[Any], path: str, keyword: str) -> Any:
        """Texts apart from other values: some formats of calls write these alone as JSON."""
        texts, others = list[Any](), list[Any]()
        for value in values:
            inner = list(_inner(value))
            if any(isinstance(each, float) and not math.isfinite(each) for each in inner):
                self.wrong(f"{path}/{keyword}", "a value that is no JSON")
            if any(_is_number(each) and abs(each) > _EXACT for each in inner):
                self._cannot_hold(path, keyword, "a number of more than 15 digits")
                return True
            if any(isinstance(each, str) and _UNWRITTEN.search(each) for each in inner):
                self._pass_over(path, keyword, "a control character is never written")
            else:
                (texts if isinstance(value, str) else others).append(value)
        return _any_of([{"enum": each} for each in (texts, others) if each])

    # What fits two parts

    def _both(self, a: Any, b: Any, path: str) -> Any:
        """Keywords that are known to be apart become one set: some formats of calls, and what tells
        members of oneOf apart, read no others. llguidance joins the sets of allOf."""
        if a is True or b is False or a == b:
            return b
        if b is True or a is False:
            return a
        self._count_part()
        if "anyOf" in a or "anyOf" in b:
            pairs = [(x, y) for x in a.get("anyOf", [a]) for y in b.get("anyOf", [b])]
            return _any_of([self._both(x, y, path) for x, y in pairs])
        if "$ref" in a:
            place, before, after = self._sources[_name(a)]
            return self._reference(place, before, self._both(after, b, path))
        if "$ref" in b:
            place, before, after = self._sources[_name(b)]
            return self._reference(place, self._both(a, before, path), after)
        types = _narrowed(a, b)
        if not types:
            return False
        typed = {"type": types} if "type" in a or "type" in b else {}
        is_apart = a.keys() & b.keys() <= {"type", "properties", "required"}
        for one, other in ((a, b), (b, a)):
            is_apart &= not (_WHOLE & one.keys() and other.keys() - {"type"})
        if not is_apart:
            return {**typed, "allOf": [*a.get("allOf", [a]), *b.get("allOf", [b])]}
        merged = {**a, **b, **typed}
        if "enum" in merged:
            values, allowed = merged["enum"], _types({"type": types})
            merged["enum"] = [each for each in values if _types({"enum": [each]}) & allowed]
        if "required" in a and "required" in b:
            merged["required"] = list(dict.fromkeys([*a["required"], *b["required"]]))
        if "properties" in a and "properties" in b:
            merged["properties"] = {
                name: self._both(
                    a["properties"].get(name, True), b["properties"].get(name, True), path
                )
                for name in dict.fromkeys([*a["properties"], *b["properties"]])
            }
        return merged

    # Unions of which one member fits

    def _choices(self, schema: Any, seen: tuple[str, ...] = ()) -> Iterator[Any]:
        if isinstance(schema, bool):
            yield from [True] if schema else []
        elif "$ref" in schema:
            if (name := _name(schema)) not in seen:
                yield from self._choices(self._definitions[name], (*seen, name))
        elif "anyOf" in schema:
            for each in schema["anyOf"]:
                yield from self._choices(each, seen)
        else:
            yield schema

    def _are_apart(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Says whether surely nothing that is written under one fits the other."""
        self._num_pairs += 1
        if self._num_pairs > MAX_PAIRS:
            self.wrong("", f"more than {MAX_PAIRS} pairs of what oneOf chooses from")
        others = list(self._choices(b))
        pairs = ((x, y) for x in self._choices(a) for y in others)
        return depth < 4 and all(self._differ(x, y, depth) for x, y in pairs)

    def _differ(self, a: Any, b: Any, depth: int) -> bool:
        if a is True or b is True:
            return False
        types = _narrowed(a, b)
        if "enum" in a and "enum" in b:
            values = [(_type(each), each) for each in b["enum"]]
            return not any((_type(each), each) in values for each in a["enum"])
        if types != "object" or "allOf" in a or "allOf" in b:
            return not types
        left, right = a.get("properties", {}), b.get("properties", {})
        required = {*a.get("required", ()), *b.get("required", ())}
        tags = required & left.keys() & right.keys()
        if any(self._are_apart(left[name], right[name], depth + 1) for name in tags):
            return True
        if {"patternProperties", "minProperties"} & (a.keys() | b.keys()):
            return False
        # Members that the other one does not name, which then has no more than it names.
        is_beyond = [
            not {*x.get("required", ())} <= {*y.get("properties", ()), *y.get("required", ())}
            for x, y in ((a, b), (b, a))
        ]
        ways = [each.get("additionalProperties") for each in (b, a)]
        is_stated = any(found and way is False for found, way in zip(is_beyond, ways, strict=True))
        return is_stated or (all(is_beyond) and ways == [None, None] and bool(left and right))


_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MEMBERS = {"properties", "patternProperties", "additionalProperties"}
# What they say depends on other keywords.
_WHOLE = {"allOf", "additionalProperties", "patternProperties", "items", "prefixItems"}
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf"}


def _tag(union: Mapping[Any, Any], member: Any) -> Any:
    """A discriminator's property has to be there, with a value of this member."""
    told = union.get("discriminator")
    name = told.get("propertyName") if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(name, str):
        return True
    mapping, ref = told.get("mapping"), member.get("$ref") if isinstance(member, Mapping) else None
    pairs = mapping.items() if isinstance(mapping, Mapping) else ()
    tags = [tag for tag, each in pairs if each == ref]
    values = {name: {"enum": tags} if tags else True}
    return {"type": "object", "properties": values, "required": [name]}


def _array(given: dict[str, Any], child: Callable[..., Any]) -> dict[str, Any]:
    first, rest = "prefixItems", "items"
    if isinstance(given.get("items"), list):  # before draft 2020-12
        first, rest = "items", "additionalItems"
    least, most = int(given.get("minItems", 0)), int(min(given.get("maxItems", 1e9), 1e9))
    items = [child(first, index) for index in range(len(given.get(first, ())))][:most]
    schema: dict[str, Any] = {}
    if items:
        schema["prefixItems"] = items
    if rest in given:
        schema["items"] = child(rest)
    if least:
        schema["minItems"] = least
    if "maxItems" in given:
        schema["maxItems"] = min(most, MAX_ITEMS)
    return schema


def _finished(schema: Any, finite: set[str], *, is_part: bool = False) -> Any:
    """The schema without what no finite value fits. Objects whose members are named have no others,
    unless it says what these are like. is_part: of allOf, which says so of all its parts."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema if _name(schema) in finite else False
    if "anyOf" in schema:
        return _any_of([_finished(each, finite) for each in schema["anyOf"]])
    found = dict(schema)
    if "allOf" in found:
        sets = [_finished(each, finite, is_part=True) for each in found["allOf"]]
        return False if False in sets else {**found, "allOf": [*sets, *_closing(found["allOf"])]}
    for keyword in ("properties", "patternProperties"):
        if keyword in found:
            members = found[keyword].items()
            found[keyword] = {name: _finished(each, finite) for name, each in members}
    for keyword in ("items", "additionalProperties"):
        if keyword in found:
            found[keyword] = _finished(found[keyword], finite)
    if "prefixItems" in found:
        found["prefixItems"] = [_finished(each, finite) for each in found["prefixItems"]]
    properties = found.get("properties", {})
    needed: list[Any] = []
    if found.get("type") == "object":
        needed = [properties.get(name) for name in found.get("required", ())]
    elif found.get("type") == "array":
        items = [*found.get("prefixItems", ()), found.get("items", True)]
        needed = items[: found.get("minItems", 0)]
    if any(each is False for each in needed):
        return False
    for closing in () if is_part else _closing([schema]):
        found = {**closing, **found, "properties": {**closing["properties"], **properties}}
    return found


def _closing(sets: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What says that objects have no members but those that are named."""
    patterns = [pattern for each in sets for pattern in each.get("patternProperties", ())]
    names = [name for each in sets for name in each.get("properties", ())]
    if not patterns:
        names += [name for each in sets for name in each.get("required", ())]
    least = max(each.get("minProperties", 0) for each in sets)
    stated = _MEMBERS.intersection(keyword for each in sets for keyword in each)
    if not stated or "additionalProperties" in stated or least > len(set(names)):
        return []
    members = {"properties": dict.fromkeys(names, True)}
    others = {"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}
    return [{**members, **others, "additionalProperties": False}]


def _num_levels(root: Any, definitions: Mapping[str, Any]) -> int:
    """Counts levels of text, where each definition is read where it is mentioned first."""
    seen: set[str] = set()
    levels, most = [iter([root])], 0
    while levels:
        most = max(most, len(levels))
        part = next(levels[-1], None)
        if part is None:
            levels.pop()
        elif isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
            if _name(part) not in seen:
                seen.add(_name(part))
                levels.append(iter([definitions[_name(part)]]))
        elif isinstance(part, (Mapping, list)):
            parts = part.values() if isinstance(part, Mapping) else part
            levels.append(each for each in list(parts) if isinstance(each, (Mapping, list)))
    return most


def _name(reference: Mapping[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _pointer(*steps: str | int) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types of what fits: with number that of whole numbers, too."""
    given = schema.get("type", get_args(_Type))
    found = {given} if isinstance(given, str) else {*given}
    if "enum" in schema and "type" not in schema:
        found = {_type(each) for each in schema["enum"]}
    return found | {"integer"} if "number" in found else found


def _narrowed(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | list[str]:
    """The types of what fits both."""
    both = _types(a) & _types(b)
    if "number" in both:
        both.remove("integer")
    return _listed_types(both)


def _listed_types(types: set[str]) -> str | list[str]:
    found = [each for each in get_args(_Type) if each in types]
    return found[0] if len(found) == 1 else found


def _type(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")


def _inner(value: Any) -> Iterator[Any]:
    """All that is in a value, itself included."""
    yield value
    if isinstance(value, (dict, list)):
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _inner(each)


def _any_of(schemas: Iterable[Any]) -> Any:
    found: list[Any] = []
    for each in schemas:
        if each is True:
            return True
        found += each["anyOf"] if each and "anyOf" in each else [each] if each else []
    found = list({json.dumps(each): each for each in found}.values())
    return False if not found else found[0] if len(found) == 1 else {"anyOf": found}


# Decimal numbers as pydantic writes their pattern, which looks ahead.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:(?P<free>\\d\*\\\.\?\\d\*)"
    r"|\(\?:\\d\{0,(?P<whole>\d+)\}"
    r"\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d+)\}0\*\))\$"
)
# In Rust, sets in sets and what joins them.
_SETS = re.compile(r"(?:^|[^\\])(?:\\\\)*\[\^?(?:\\.|[^\]\\])*?(?:\[|&&|--|~~)")


def _without_lookahead(pattern: str) -> str:
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is None:
        return pattern
    if decimal["free"]:
        return r"^[+-]?[0-9]+(?:\.[0-9]*)?$"
    return rf"^[+-]?[0-9]{{1,{decimal['whole']}}}(?:\.[0-9]{{0,{decimal['places']}}})?$"


@lru_cache(maxsize=256)
def _fault_of(pattern: str) -> str:
    """Says what is wrong with a pattern. Raises MissingDependencyError without llguidance."""
    library = open_llguidance()
    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        source = library.LLMatcher.grammar_from_json_schema(schema)
        matcher = library.LLMatcher(library.LLTokenizer("byte"), source, log_level=0)
        fault = matcher.get_error()
    except ValueError as error:
        fault = str(error)
    return " ".join((fault or "").split()).rpartition("error: ")[2][:200]


def open_llguidance() -> ModuleType:
    """Raises MissingDependencyError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise MissingDependencyError(
            "answers of a given form need llguidance, which is not installed",
            remedy='Run: pip install "edge-spec[grammar]".',
        ) from None
    return llguidance
