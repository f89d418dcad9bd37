"""Prepares people's JSON Schemas for llguidance, whose compiler holds answers to them.

What llguidance holds wrongly or not at all is refused, or passed over, in a line with its place.
The rest becomes anyOf of parts of one type each: llguidance reads keywords beside a reference, and
members of a union that are references, in fewer ways than people write them.
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
        """Returns true, false, a reference, anyOf, allOf of one type, or keywords of one type."""
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
        found = self._typed(given, path, child) if given.get("not", True) else False
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
        return _any_of([found, {"const": None}]) if is_null else found

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

    # Keywords of types

    def _typed(self, given: dict[str, Any], path: str, child: Callable[..., Any]) -> Any:
        if given.keys() <= _GENERAL:
            return True
        asked = given.get("type", get_args(_Type))
        types = dict.fromkeys([asked] if isinstance(asked, str) else asked)
        if "number" in types:
            types.pop("integer", None)
        is_number = "number" in types or "integer" in types
        writers: dict[str, Callable[[], Any]] = {
            "null": lambda: {"const": None},
            "boolean": lambda: {"type": "boolean"},
            "number": lambda: self._number(given, path),
            "integer": lambda: self._number(given, path, is_whole=True),
            "string": lambda: self._string(given, path, is_number=is_number),
            "array": lambda: _array(given, child),
            "object": lambda: self._object(given, path, child),
        }
        return _any_of([writers[each]() for each in types])

    def _number(self, given: dict[str, Any], path: str, *, is_whole: bool = False) -> Any:
        """With bounds as llguidance holds them exactly."""
        above, within = given.get("exclusiveMinimum"), given.get("exclusiveMaximum")
        lows: list[tuple[float, bool]] = []
        highs: list[tuple[float, bool]] = []
        if given.get("format") in formats.BOUNDS:
            is_whole, (least, most) = True, formats.BOUNDS[given["format"]]
            lows, highs = [(least, False)], [(most, True)]
        if "minimum" in given:
            lows.append((given["minimum"], above is True))  # true is draft 4's
        if "maximum" in given:
            highs.append((given["maximum"], within is not True))
        lows += [] if above is None or isinstance(above, bool) else [(above, True)]
        highs += [] if within is None or isinstance(within, bool) else [(within, False)]
        low, is_above = max([(-_GREATEST, False), *lows])
        high, is_within = min([(_GREATEST, True), *highs])
        if is_whole:
            low = math.floor(low) + 1 if is_above else math.ceil(low)
            high = math.floor(high) if is_within else math.ceil(high) - 1
            is_above, is_within = False, True
        if low > high or (low == high and (is_above or not is_within)):
            return False
        if low != high and int(low) == int(high):
            # A whole number that is left out is taken for a value: by a millionth it is not.
            margin = 10.0 ** (math.floor(math.log10(high - low)) - 6)
            if is_above and low == int(low):
                low, is_above = low + margin, False
            if not is_within and high == int(high):
                high, is_within = high - margin, True
        schema: dict[str, Any] = {"type": "integer" if is_whole else "number"}
        if lows:
            schema["exclusiveMinimum" if is_above else "minimum"] = low
        if highs:
            schema["maximum" if is_within else "exclusiveMaximum"] = high
        if "multipleOf" in given:
            step = shifted = given["multipleOf"]
            while shifted != int(shifted) and shifted < _MAX_STEP:  # as llguidance reads it
                shifted *= 10
            if shifted <= _MAX_STEP or str(int(shifted)).strip("0") == "1":
                schema["multipleOf"] = step
            else:
                self._cannot_hold(path, "multipleOf", "it has too many digits")
        return schema

    def _string(self, given: dict[str, Any], path: str, *, is_number: bool) -> Any:
        schema: dict[str, Any] = {"type": "string"}
        if given.get("minLength"):
            schema["minLength"] = int(given["minLength"])
        if "maxLength" in given:
            schema["maxLength"] = min(int(given["maxLength"]), MAX_LENGTH)
        pattern = self._pattern(given["pattern"], path, "pattern") if "pattern" in given else None
        if pattern is not None:
            schema["pattern"] = pattern
        name = given.get("format", "text")
        if name in formats.PATTERNS:
            form = {"type": "string", "pattern": f"^(?:{formats.PATTERNS[name]})$"}
            return _all_of(schema, form) if pattern is not None else {**schema, **form}
        if name in formats.NATIVE:
            schema["format"] = name
        elif name not in formats.FREE and not (is_number and name in formats.NUMBERS):
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

    def _object(self, given: dict[str, Any], path: str, child: Callable[..., Any]) -> Any:
        schema: dict[str, Any] = {"type": "object"}
        if "properties" in given:
            schema["properties"] = {name: child("properties", name) for name in given["properties"]}
        if "patternProperties" in given:
            schema["patternProperties"] = patterns = {}
            for pattern in given["patternProperties"]:
                written = self._pattern(pattern, path, "patternProperties")
                if written is not None:
                    patterns[written] = child("patternProperties", pattern)
        if "additionalProperties" in given:
            schema["additionalProperties"] = child("additionalProperties")
        if given.get("required"):
            schema["required"] = list(dict.fromkeys(given["required"]))
        if "propertyNames" in given:
            self._hold_names(given["propertyNames"], schema, path)
        return self._counted(given, schema, path)

    def _hold_names(self, raw: Any, schema: dict[str, Any], path: str) -> None:
        """propertyNames: those that are listed become members, others are a pattern."""
        for _ in range(MAX_DEPTH):
            if isinstance(raw, Mapping) and isinstance(raw.get("$ref"), str):
                raw = self._pointed(raw["$ref"].removeprefix("#"))
        names = self._written(raw, f"{path}/propertyNames")
        names = self._both(names, {"type": "string"}, path)
        others = schema.get("additionalProperties", True)
        kinds = names.keys() if isinstance(names, dict) else set()
        is_beside = bool(schema.get("properties")) or "patternProperties" in schema
        if names == {"type": "string"}:
            return
        if not is_beside and kinds == {"enum"}:
            schema["properties"] = dict.fromkeys(names["enum"], others)
        elif not is_beside and kinds and kinds <= {"type", "minLength", "maxLength"}:
            length = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            schema["patternProperties"] = {f"^(?s:.{{{length}}})$": others}
        elif not is_beside and kinds == {"type", "pattern"}:
            schema["patternProperties"] = {names["pattern"]: others}
        else:
            why = "names are listed, one pattern, or of a length, and no others are named"
            self._cannot_hold(path, "propertyNames", why)
            return
        schema["additionalProperties"] = False

    def _counted(self, given: dict[str, Any], schema: dict[str, Any], path: str) -> Any:
        """minProperties and maxProperties: llguidance counts members that have no names."""
        least, most = int(given.get("minProperties", 0)), given.get("maxProperties", math.inf)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        named = {*properties, *required}
        others = schema.get("additionalProperties", not properties or least > len(named))
        is_open = others is not False or bool(schema.get("patternProperties"))
        if most < max(least, len(required)) or (not is_open and least > len(named)):
            return False
        counts: dict[str, Any] = {}
        if least > len(required):
            counts["minProperties"] = min(least, MAX_ITEMS)
        if most < math.inf and (is_open or most < len(named)):
            counts["maxProperties"] = min(int(most), MAX_ITEMS)
        is_one = least <= len(required) + 1 and most in (math.inf, len(required) + 1)
        if counts and len(named) > len(required) and (is_open or not is_one):
            self._cannot_hold(path, next(iter(counts)), "not all members are required")
            return schema
        if is_open and counts.get("minProperties", 0) > 1:
            self._pass_over(path, "minProperties", "names may be alike")
        return schema | counts

    def _listed(self, values: Sequence[Any], path: str, keyword: str) -> Any:
        texts = dict.fromkeys(value for value in values if isinstance(value, str))
        kept = [text for text in texts if not _UNWRITTEN.search(text)]
        numbers = [value for value in values if _is_number(value)]
        found: list[Any] = [{"enum": each} for each in (kept, numbers) if each]
        if len(kept) < len(texts):
            self._pass_over(path, keyword, "a control character is never written")
        if any(abs(value) > _EXACT for value in numbers):
            self._cannot_hold(path, keyword, "a number of more than 15 digits")
            found[-1] = {"type": "number"}
        for value in values:
            if isinstance(value, float) and not math.isfinite(value):
                self.wrong(f"{path}/{keyword}", "a value that is no JSON")
            if value is None or isinstance(value, bool):
                found.append({"const": value})
            elif isinstance(value, list):
                counts = {"minItems": len(value), "maxItems": len(value), "items": False}
                items = [self._listed([each], path, keyword) for each in value]
                found.append({"type": "array", "prefixItems": items, **counts})
            elif isinstance(value, dict):
                members = {name: self._listed([value[name]], path, keyword) for name in value}
                names = {"required": list(value), "additionalProperties": False}
                found.append({"type": "object", "properties": members, **names})
        return _any_of(found)

    # What fits two parts

    def _both(self, a: Any, b: Any, path: str) -> Any:
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
        if _kind(a) != _kind(b):
            return False
        values, others = _values(a), _values(b)
        if values is not None and others is not None and "allOf" not in {*a, *b}:
            left = [value for value in values if value in others]
            return False if not left else a if "const" in a else {"enum": left}
        for listed, other in ((a, b), (b, a)):
            if "enum" in listed and other.get("type") == "integer":
                listed = {"enum": [value for value in listed["enum"] if value == int(value)]}
                return _all_of(listed, other) if listed["enum"] else False
            if _values(listed) is not None and other == {"type": _kind(listed)}:
                return listed
        if {"enum", "allOf"} & (a.keys() | b.keys()) or _kind(a) == "array":
            return _all_of(a, b)
        if _kind(a) == "object":
            return self._both_objects(a, b, path)
        if _kind(a) == "number":
            return self._both_numbers(a, b, path)
        is_said_twice = any(a[k] != b[k] for k in a.keys() & b.keys())
        return _all_of(a, b) if is_said_twice else {**a, **b}

    def _both_numbers(self, a: Any, b: Any, path: str) -> Any:
        merged = {**a, **b}
        merged |= {k: t(a[k], b[k]) for k, t in _TIGHTER.items() if k in a and k in b}
        if "multipleOf" in a and "multipleOf" in b and a["multipleOf"] != b["multipleOf"]:
            self._cannot_hold(path, "multipleOf", "of two numbers")
        return self._number(merged, path, is_whole="integer" in (a["type"], b["type"]))

    def _both_objects(self, a: dict[str, Any], b: dict[str, Any], path: str) -> Any:
        for each, other in ((a, b), (b, a)):
            if each.get("patternProperties") and _MEMBERS & other.keys():
                self._cannot_hold(path, "patternProperties", "beside members of another schema")
        merged = {**a, **b}
        merged |= {k: t(a[k], b[k]) for k, t in _TIGHTER.items() if k in a and k in b}
        if "required" in merged:
            names = [*a.get("required", ()), *b.get("required", ())]
            merged["required"] = list(dict.fromkeys(names))
        others, more = (each.get("additionalProperties", True) for each in (a, b))
        for keyword in ("properties", "patternProperties"):
            if keyword not in merged:
                continue
            left, right = a.get(keyword, {}), b.get(keyword, {})
            merged[keyword] = {
                name: self._both(left.get(name, others), right.get(name, more), path)
                for name in dict.fromkeys([*left, *right])
            }
        if "additionalProperties" in merged:
            merged["additionalProperties"] = self._both(others, more, path)
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
        if a is True or b is True or _kind(a) != _kind(b):
            return a is not True and b is not True
        values, others = _values(a), _values(b)
        if values is not None and others is not None:
            return not any(value in others for value in values)
        if _kind(a) != "object":
            return False
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
_TIGHTER: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxItems", "maxProperties"), min),
}
_MEMBERS = {"properties", "patternProperties", "additionalProperties"}
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


def _array(given: dict[str, Any], child: Callable[..., Any]) -> Any:
    first, rest = "prefixItems", "items"
    if isinstance(given.get("items"), list):  # before draft 2020-12
        first, rest = "items", "additionalItems"
    least, most = int(given.get("minItems", 0)), int(min(given.get("maxItems", 1e9), 1e9))
    items = [child(first, index) for index in range(len(given.get(first, ())))][:most]
    schema: dict[str, Any] = {"type": "array"}
    if items:
        schema["prefixItems"] = items
    if rest in given:
        schema["items"] = child(rest)
    if least:
        schema["minItems"] = least
    if "maxItems" in given:
        schema["maxItems"] = min(most, MAX_ITEMS)
    return False if least > most else schema


def _finished(schema: Any, finite: set[str]) -> Any:
    """The schema without what no finite value fits. Objects whose members are named have no others,
    unless it says what these are like."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema if _name(schema) in finite else False
    found = dict(schema)
    for keyword in ("anyOf", "allOf", "prefixItems"):
        if keyword in found:
            found[keyword] = [_finished(each, finite) for each in found[keyword]]
    for keyword in ("properties", "patternProperties"):
        if keyword in found:
            members = found[keyword].items()
            found[keyword] = {name: _finished(each, finite) for name, each in members}
    for keyword in ("items", "additionalProperties"):
        if keyword in found:
            found[keyword] = _finished(found[keyword], finite)
    if "anyOf" in found:
        return _any_of(found["anyOf"])
    if found.get("type") == "object":
        found = _closed(found)
        needed = [found["properties"].get(name) for name in found.get("required", ())]
    else:
        items = [*found.get("prefixItems", ()), found.get("items", True)]
        needed = [*found.get("allOf", ()), *items[: found.get("minItems", 0)]]
    return False if False in [each is not False for each in needed] else found


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    properties, patterns = dict(schema.get("properties", {})), schema.get("patternProperties", {})
    is_open = not _MEMBERS & schema.keys() or schema.get("minProperties", 0) > len(properties)
    others = schema.get("additionalProperties", True)
    for name in () if patterns else schema.get("required", ()):
        properties.setdefault(name, others)
    return {"additionalProperties": is_open, **schema, "properties": properties}


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


def _values(schema: Mapping[str, Any]) -> Any:
    parts = schema.get("allOf", [schema])
    listed = (each.get("enum", [each["const"]] if "const" in each else None) for each in parts)
    return next((values for values in listed if values is not None), None)


def _kind(schema: Mapping[str, Any]) -> str:
    if "type" in schema:
        return "number" if schema["type"] == "integer" else str(schema["type"])
    value = _values(schema)[0]
    kinds = {str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _any_of(schemas: Iterable[Any]) -> Any:
    found: list[Any] = []
    for each in schemas:
        if each is True:
            return True
        found += each["anyOf"] if each and "anyOf" in each else [each] if each else []
    found = list({json.dumps(each): each for each in found}.values())
    return False if not found else found[0] if len(found) == 1 else {"anyOf": found}


def _all_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": _kind(a), "allOf": [*a.get("allOf", [a]), *b.get("allOf", [b])]}


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
