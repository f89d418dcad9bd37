"""Check and rewrite users' JSON Schemas for llguidance, which enforces them.

One walk refuses, naming the place, what llguidance does not enforce correctly, reports what is
ignored, and rewrites what llguidance spells differently: nullable, draft 4's exclusive bounds,
tuples before draft 2020-12, formats, discriminators. An object whose properties are all named in
one part of the schema allows no others, unless the schema describes them.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import unquote

from pydantic import Field, TypeAdapter, ValidationError

from edge_spec.errors import MissingDependencyError, UsageError, install

_log = logging.getLogger(__name__)

MAX_DEPTH = 100  # nested parts, through references; llguidance overflows its stack at some hundreds
MAX_PARTS = 20_000
MAX_ITEMS = 1000  # of an array; each becomes a part of the grammar
MAX_LENGTH = 100_000  # of a string
_GREATEST = 10**15 - 1  # largest bound: bounds become regular expressions over digits
_MAX_STEP = 10_000  # multipleOf without its decimal point: llguidance counts remainders

_Type = Literal["null", "boolean", "number", "integer", "string", "array", "object"]
_ANNOTATIONS = re.compile(
    r"\$(anchor|comment|defs|dynamicAnchor|id|recursiveAnchor|schema|vocabulary)|components"
    r"|content(Encoding|MediaType)|default|definitions|deprecated|description|discriminator|else"
    r"|examples?|externalDocs|id|markdownDescription|(max|min)Contains|readOnly|strict|then|title"
    r"|writeOnly|xml|x-.*"
)
_NOT_HELD = {
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
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_OTHERS = ("additionalProperties", "patternProperties", "propertyNames")
_MEMBERS = ("properties", "required", *_OTHERS)

_Number = Annotated[float, Field(allow_inf_nan=False)] | int
_Schema = dict[Any, Any] | bool
_MANY = Field(max_length=MAX_PARTS)
_COUNT = Annotated[_Number, Field(ge=0, multiple_of=1)]
_VALUE_TYPES: dict[str, Any] = {
    "type": _Type | Annotated[list[_Type], Field(min_length=1)],
    **dict.fromkeys(("enum", *_IN_PLACE[1:], "prefixItems"), Annotated[list[Any], _MANY]),
    "const": Any,
    "required": list[str],
    **dict.fromkeys(("minimum", "maximum"), _Number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _Number | bool),
    "multipleOf": Annotated[_Number, Field(gt=0)],
    "minLength": Annotated[_COUNT, Field(le=MAX_LENGTH)],
    "minItems": Annotated[_COUNT, Field(le=MAX_ITEMS)],
    **dict.fromkeys(("maxItems", "maxLength", "minProperties", "maxProperties"), _COUNT),
    "properties": Annotated[dict[Any, Any], _MANY],
    "patternProperties": Annotated[dict[Any, Any], Field(max_length=100)],
    "items": _Schema | Annotated[list[Any], _MANY],
    **dict.fromkeys(("additionalItems", "additionalProperties", "propertyNames"), _Schema),
    **dict.fromkeys(("$ref", "format", "pattern"), Annotated[str, _MANY]),
    **dict.fromkeys(("nullable", "uniqueItems"), bool),
}
_ADAPTERS = {keyword: TypeAdapter(kind) for keyword, kind in _VALUE_TYPES.items()}
_MOST = {"maxLength": MAX_LENGTH, "minProperties": MAX_ITEMS} | dict.fromkeys(
    ("maxItems", "maxProperties"), MAX_ITEMS
)


@dataclass(frozen=True)
class HeldSchema:
    """schema: allows only values of the given schema, except for what is ignored. passed_over: the
    ignored keywords with their places."""

    schema: dict[str, Any]
    passed_over: tuple[str, ...]


@lru_cache(maxsize=256)
def held_schema(
    source: str, *, is_strict: bool = True, is_object: bool = False, name: str = "#"
) -> HeldSchema:
    """Return a schema as llguidance enforces it; warn of what is ignored.

    source: JSON. is_object: values must be objects. name: for messages. Raises UsageError for an
    invalid schema and, if `is_strict`, for a keyword that cannot be enforced.
    """
    checker = _Checker(json.loads(source), is_strict, name)
    try:
        held = HeldSchema(checker.checked(is_object=is_object), tuple(checker.passed_over))
    except RecursionError:
        checker.wrong("", "too many levels")
    if held.passed_over:
        whose = "the schema" if name == "#" else name
        _log.warning("answers are not held to parts of %s: %s", whose, "; ".join(held.passed_over))
    return held


class _Checker:
    def __init__(self, schema: Any, is_strict: bool, name: str) -> None:
        self.passed_over: dict[str, None] = {}
        self._schema = schema
        self._is_strict = is_strict
        self._name = name
        self._num_parts = 0
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[str, bool], str] = {}  # by place and is_whole

    def checked(self, *, is_object: bool) -> dict[str, Any]:
        root = self._part(self._schema, "", 0)
        if is_object and root is not False:
            root = _as_object(root)
        if root is False:
            self.wrong("", "Unsatisfiable schema (nothing fits it)")
        root = {} if root is True else root
        return {**root, "$defs": self._definitions} if self._definitions else root

    # Errors

    def wrong(self, path: str, why: str) -> NoReturn:
        raise UsageError(
            f"no answer can have this form: {why} at {self._name}{path}",
            remedy="Correct the schema.",
        )

    def _cannot_hold(self, path: str, keyword: str, why: str) -> None:
        if self._is_strict:
            raise UsageError(
                f"answers cannot be held to {keyword} at {self._name}{path}/{keyword} ({why})",
                remedy="Leave it out, or say strict: false, so that it is passed over.",
            )
        self._ignore(path, keyword, why)

    def _ignore(self, path: str, keyword: str, why: str) -> None:
        self.passed_over.setdefault(f"{keyword} at #{path}/{keyword} ({why})")

    # Parts of the schema

    def _part(self, raw: Any, path: str, depth: int, *, is_whole: bool = True) -> Any:
        """is_whole: no other part describes the same value, so this one may forbid unnamed
        properties."""
        if isinstance(raw, bool):
            return raw
        if not isinstance(raw, Mapping):
            kind = {str: "a string", list: "a list", type(None): "null"}.get(type(raw), "a number")
            self.wrong(path, f"a schema is an object or a truth value, not {kind}")
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            self.wrong("", f"more than {MAX_PARTS} parts")
        if depth > MAX_DEPTH:
            self.wrong("", f"more than {MAX_DEPTH} levels")
        given = self._keywords(raw, path)
        if given.get("not") is False:
            return False
        self._rewrite(given, path)
        ways = sum(len(given[k]) if k == "allOf" else 1 for k in _IN_PLACE if k in given)
        has_members = any(keyword in given for keyword in _MEMBERS)
        is_plain = is_whole and not (ways > 1 or (ways and has_members))
        found: dict[str, Any] = {}
        for keyword, value in given.items():

            def part(each: Any, *step: str | int, keyword: str = keyword) -> Any:
                is_own = is_plain if keyword in _IN_PLACE else True
                return self._part(each, path + _pointer(keyword, *step), depth + 1, is_whole=is_own)

            if keyword == "$ref":
                found |= self._reference(value, path, depth, is_plain)
            elif keyword in ("properties", "patternProperties"):
                found[keyword] = {name: part(each, name) for name, each in value.items()}
            elif keyword in ("allOf", "anyOf", "prefixItems"):
                found[keyword] = [part(each, index) for index, each in enumerate(value)]
            elif keyword in ("items", "additionalProperties"):
                found[keyword] = part(value)
            elif keyword != "nullable":
                found[keyword] = value
        if is_plain and has_members:
            _close(found)
        is_null = given.get("nullable") and not {"enum", "const"} & given.keys()
        return {"anyOf": [found, {"type": "null"}]} if is_null else found

    def _keywords(self, raw: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """Return the enforceable keywords. Many programs write null for unset ones."""
        given: dict[str, Any] = {}
        for keyword, value in _with_tags(raw).items():
            is_unset = value is None and keyword != "const"
            if is_unset or _ANNOTATIONS.fullmatch(str(keyword)):
                continue
            if keyword in ("properties", "patternProperties"):
                value = value or {}  # PHP writes an empty list
            if keyword == "required" and isinstance(value, bool):  # draft 3, inside a property
                self._ignore(path, keyword, "it is a list of names")
            elif keyword == "not" and value in ({}, True):  # zod's "nothing fits"
                given[keyword] = False
            elif keyword == "unevaluatedProperties" and raw.keys().isdisjoint(_IN_PLACE):
                given.setdefault("additionalProperties", value)
            elif keyword in _NOT_HELD:
                self._cannot_hold(path, keyword, _NOT_HELD[keyword])
            elif keyword in _ADAPTERS:
                if fault := _value_fault(keyword, value):
                    self._cannot_hold(path, keyword, fault)
                else:
                    given[keyword] = value
            elif keyword == "contentSchema":
                self._ignore(path, keyword, "the text in the string is free")
            else:
                self._ignore(path, str(keyword), "no keyword of JSON Schema")
        if given.pop("uniqueItems", False):
            self._ignore(path, "uniqueItems", "items may be alike")
        if "oneOf" in given and not isinstance(raw.get("discriminator"), Mapping):
            self._ignore(path, "oneOf", "held as anyOf: a value may fit two members")
        return given

    # References

    def _reference(self, ref: str, path: str, depth: int, is_whole: bool) -> dict[str, Any]:
        place = ref[1:]
        target = self._target(ref)
        if target is None:
            self._cannot_hold(path, "$ref", f"{ref[:100]!r} is not in the schema")
            return {}
        key = place, is_whole
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            self._definitions[name] = True
            self._definitions[name] = self._part(target, place, depth + 1, is_whole=is_whole)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _target(self, ref: str) -> Any:
        if not re.match(r"#(/|$)", ref):
            return None
        found: Any = self._schema
        for step in ref[1:].split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (LookupError, TypeError, ValueError):
                return None
        return found

    # Keywords as llguidance takes them

    def _rewrite(self, given: dict[str, Any], path: str) -> None:
        for keyword in ("minLength", "minItems", *_MOST):
            if keyword in given:
                given[keyword] = int(min(given[keyword], _MOST.get(keyword, MAX_LENGTH)))
        for keyword in ("enum", "const"):
            if keyword in given:
                given |= self._values(given.pop(keyword), path, keyword)
        self._rewrite_numbers(given, path)
        self._rewrite_texts(given, path)
        self._rewrite_members(given, path)
        others = given.pop("additionalItems", None)
        if isinstance(given.get("items"), list):  # the form before draft 2020-12
            given["prefixItems"] = given.pop("items")
            given |= {} if others is None else {"items": others}
        if "anyOf" in given and "oneOf" in given:
            both = [{"anyOf": given.pop("anyOf")}, {"anyOf": given.pop("oneOf")}]
            given["allOf"] = [*given.get("allOf", ()), *both]
        if "oneOf" in given:
            given["anyOf"] = given.pop("oneOf")

    def _rewrite_texts(self, given: dict[str, Any], path: str) -> None:
        patterns = (
            [self._pattern(given.pop("pattern"), path, "pattern")] if "pattern" in given else []
        )
        name = given.pop("format", None)
        if name in FORMATS:
            patterns.append(f"^(?:{FORMATS[name]})$")
        elif name in _NATIVE_FORMATS:
            given["format"] = name
        elif name is not None and name not in _FREE_FORMATS and name not in BOUNDS:
            self._ignore(path, "format", f"{name[:40]} is not known")
        for pattern in filter(None, patterns):
            if "pattern" in given:
                given["allOf"] = [*given.get("allOf", ()), {"pattern": pattern}]
            else:
                given["pattern"] = pattern

    def _rewrite_members(self, given: dict[str, Any], path: str) -> None:
        patterns = given.get("patternProperties", {}).items()
        written = {self._pattern(each, path, "patternProperties"): part for each, part in patterns}
        if patterns:
            given["patternProperties"] = {each: part for each, part in written.items() if each}
        names = given.pop("propertyNames", None)
        if (ref := _known(names).get("$ref")) is not None:
            names = self._target(ref)
        listed = _known(names).get("enum")
        if listed is not None and "properties" not in given:
            others = given.get("additionalProperties", True)
            given["properties"] = {name: others for name in listed if isinstance(name, str)}
            given["additionalProperties"] = False
        elif names is not None and names not in ({"type": "string"}, {}, True):
            self._cannot_hold(path, "propertyNames", "names are not told apart; list them")
        if given.get("minProperties", 0) > 1:
            self._ignore(path, "minProperties", "names may be alike")
        counts = {"minProperties", "maxProperties"} & given.keys()
        if counts and set(given.get("properties", ())) - set(given.get("required", ())):
            self._cannot_hold(path, min(counts), "not all members are required")
            for keyword in counts:
                del given[keyword]

    def _values(self, value: Any, path: str, keyword: str) -> dict[str, Any]:
        values = value if keyword == "enum" else [value]
        texts = list(map(json.dumps, values))
        if any(_MANY_DIGITS.search(_TEXT.sub("", text)) for text in texts):
            self._cannot_hold(path, keyword, "a number of more than 15 digits")
            return {}
        written = [v for v, text in zip(values, texts, strict=True) if not _CONTROL.search(text)]
        if len(written) == len(values):
            return {keyword: value}
        self._ignore(path, keyword, "a control character is never written")
        return {"enum": written}

    def _rewrite_numbers(self, given: dict[str, Any], path: str) -> None:
        if "multipleOf" in given and not _is_countable(given["multipleOf"]):
            del given["multipleOf"]
            self._cannot_hold(path, "multipleOf", "it has too many digits")
        above, within = given.pop("exclusiveMinimum", None), given.pop("exclusiveMaximum", None)
        lows: list[tuple[float, bool]] = []
        highs: list[tuple[float, bool]] = []
        if given.get("format") in BOUNDS:
            least, most = BOUNDS[given["format"]]
            lows, highs = [(least, False)], [(most, True)]
        if "minimum" in given:
            lows.append((given.pop("minimum"), above is True))  # true is draft 4's form
        if "maximum" in given:
            highs.append((given.pop("maximum"), within is not True))
        lows += [] if above is None or isinstance(above, bool) else [(above, True)]
        highs += [] if within is None or isinstance(within, bool) else [(within, False)]
        low, is_above = max([(-_GREATEST, False), *lows])
        high, is_within = min([(_GREATEST, True), *highs])
        if low < high and int(low) == int(high):
            # llguidance would allow the excluded integer; a bound moved by a millionth excludes it.
            margin = 10.0 ** (math.floor(math.log10(high - low)) - 6)
            if is_above and low == int(low):
                low, is_above = low + margin, False
            if not is_within and high == int(high):
                high, is_within = high - margin, True
        if lows:
            given["exclusiveMinimum" if is_above else "minimum"] = low
        if highs:
            given["maximum" if is_within else "exclusiveMaximum"] = high

    def _pattern(self, pattern: str, path: str, keyword: str) -> str | None:
        """Return the pattern for Rust; None if it is ignored."""
        written = _without_lookahead(pattern)
        fault = "a set of characters in a set" if _SETS.search(written) else _fault_of(written)
        if not fault:
            return written
        self._cannot_hold(path, keyword, f"{pattern[:100]!r}: {fault}")
        return None


def _close(found: dict[str, Any]) -> None:
    """Forbid unnamed properties in an object that names some."""
    names = dict.fromkeys([*found.get("properties", ()), *found.get("required", ())], True)
    if "patternProperties" in found:
        found.setdefault("additionalProperties", False)
    elif found.keys().isdisjoint(_OTHERS) and found.get("minProperties", 0) <= len(names):
        found["properties"] = {**names, **found.get("properties", {})}
        found["additionalProperties"] = False


def _known(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        return {}
    told = _with_tags(raw).items()
    return {key: value for key, value in told if key in _ADAPTERS and not _value_fault(key, value)}


def _value_fault(keyword: str, value: Any) -> str:
    try:
        _ADAPTERS[keyword].validate_python(value, strict=True)
    except ValidationError as error:
        return error.errors()[0]["msg"]
    return ""


def _with_tags(raw: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Require a discriminator's property in each member of a union."""
    told = raw.get("discriminator")
    name = told.get("propertyName") if isinstance(told, Mapping) else None
    if not isinstance(name, str):
        return raw
    tag = {"required": [name]}
    unions = [key for key in ("anyOf", "oneOf") if isinstance(raw.get(key), list)]
    return {**raw, **{key: [{"allOf": [each, tag]} for each in raw[key]] for key in unions}}


def _as_object(root: Any) -> Any:
    if root is True:
        return {"type": "object"}
    is_plain = isinstance(root, dict) and not {"anyOf", "$ref", "allOf"} & root.keys()
    return {**root, "type": "object"} if is_plain else {"type": "object", "allOf": [root]}


def _is_countable(step: float) -> bool:
    shifted = step
    while shifted != int(shifted) and shifted < _MAX_STEP:  # as llguidance reads it
        shifted *= 10
    return shifted <= _MAX_STEP or str(int(shifted)).strip("0") == "1"


def _pointer(*steps: str | int) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)


_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_MANY_DIGITS = re.compile(r"\d{16}")
_CONTROL = re.compile(r"\\u00(?:0[0-7be-f]|1|7f)")
# The beginning and the lookaheads of pydantic's patterns for decimal numbers.
_DECIMAL, _AHEAD = "^(?!^[-+.]*$)", re.compile(r"\(\?[!=][^()]*\)")
# Nested sets and set operations in Rust's syntax.
_SETS = re.compile(r"(?:^|[^\\])(?:\\\\)*\[\^?(?:\\.|[^\]\\])*?(?:\[|&&|--|~~)")


def _without_lookahead(pattern: str) -> str:
    if not pattern.startswith(_DECIMAL):
        return pattern
    pattern = _AHEAD.sub("", pattern).replace(r"\d{0,", "[0-9]{1,")
    return pattern.replace(r"\d*\.?\d*", r"[0-9]+(?:\.[0-9]+)?")


@lru_cache(maxsize=256)
def _fault_of(pattern: str) -> str:
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
    """Raises MissingDependencyError."""
    try:
        import llguidance
    except ImportError:
        raise MissingDependencyError(
            "answers of a given form need llguidance, which is not installed",
            remedy=f"{install('grammar')}.",
        ) from None
    return llguidance


# Formats that llguidance enforces; and those that any string or number fits.
_NATIVE_FORMATS = frozenset({"email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_FREE_FORMATS = frozenset(
    {"path", "binary", "password", "textarea", "text", "float", "double", "number", "decimal"}
)
_HEX = "[0-9a-fA-F]"
# Existing days, in years of four digits: schemas do not mean earlier ones.
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_SPAN = "(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
# Formats for which llguidance's own patterns allow more than the standard, or than the program that
# wrote the schema accepts: dates must exist, no leap seconds, durations of bounded length.
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]{{1,5}}W|[0-9]{{1,6}}D|(?:[0-9]{{1,6}}D)?T{_SPAN})",
    **{
        f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
        for n in range(1, 9)
    },
}
# Least and greatest value of integer formats.
BOUNDS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
