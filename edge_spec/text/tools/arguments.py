"""Arguments of calls: their schema, as grammars and readers have it, and their values where they
are written one by one: as JSON, as Python, in quotes of a model's own, or as bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from edge_spec.errors import UsageError
from edge_spec.text.grammar import JSON_STYLE, tell_passed_over

if TYPE_CHECKING:
    from edge_spec.text.json_schema import HeldSchema

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_MAX_ALTERNATIVES, _MAX_CHOICES = 200, 1000
ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
TEXT = frozenset(("string",))
# With one of them, a schema says what members an object may have.
_NAMING = (
    *("$ref", "allOf", "anyOf", "const", "enum", "if", "oneOf"),
    *("additionalProperties", "patternProperties", "properties", "propertyNames"),
)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments, which are an object whatever the function's schema says.
    Those that it does not name are left out: a small model would make up more and more of them.

    What is in a tool's schema is often not the client's to change: keywords that cannot be held are
    passed over, unless the tool says strict: true. Raises UsageError for a schema that is none."""
    parameters = function.get("parameters")
    parameters = {} if parameters is None else parameters
    if isinstance(parameters, Mapping) and all(parameters.get(each) is None for each in _NAMING):
        parameters = {**parameters, "properties": {}}
    source = json.dumps(parameters)
    return _held_arguments(source, function["name"], function.get("strict") is True).schema


@lru_cache(maxsize=256)
def _held_arguments(source: str, name: str, is_strict: bool) -> HeldSchema:
    from edge_spec.text.json_schema import held_schema

    place = f"the parameters of {name}"
    held = held_schema(json.loads(source), is_strict=is_strict, is_object=True, name=place)
    tell_passed_over(place, held)
    return held


def as_lark(schema: Any, definitions: Mapping[str, Any] | None = None) -> str:
    """Return what Lark's %json takes, with JSON written as elsewhere. definitions: what the schema
    may refer to."""
    schema = dict(schema) if isinstance(schema, Mapping) else {"anyOf": [schema]}
    if definitions and '"$ref"' in json.dumps(schema):
        schema["$defs"] = dict(definitions)
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


def definitions_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("$defs")
    return found if isinstance(found, Mapping) else {}


def alternatives(
    schema: Any,
    definitions: Mapping[str, Any],
    seen: frozenset[str] = frozenset(),
    counted: list[Any] | None = None,
) -> list[Any]:
    """Return the schemas that a schema chooses from, each of one type where that is known: mappings
    without references and unions; True for anything. Raises UsageError for too many."""
    counted = [] if counted is None else counted
    counted.append(schema)
    if len(counted) > _MAX_CHOICES:
        raise UsageError(
            "the arguments of a tool choose from too many schemas", remedy="Simplify its schema."
        )
    if not isinstance(schema, Mapping):
        return [] if schema is False else [True]
    own = {name: value for name, value in schema.items() if name not in _IN_PLACE}
    types = own.get("type")
    found = [{**own, "type": each} for each in types] if isinstance(types, list) else [own or True]
    ways = [[each] for each in schema.get("allOf", ())]
    ways += [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        ways.append([] if name in seen else [definitions.get(name, True)])
        seen |= {name}
    for way in ways:
        choices = [
            each for option in way for each in alternatives(option, definitions, seen, counted)
        ]
        both = (_merged(a, b) for a in found for b in choices)
        found = list(islice((each for each in both if each is not False), _MAX_ALTERNATIVES))
    return found


def _merged(a: Any, b: Any) -> Any:
    """Return the schema of what fits both of two alternatives; False where nothing does."""
    if a is True or b is True:
        return b if a is True else a
    types = {each["type"] for each in (a, b) if "type" in each}
    if len(types) > 1 and types != {"integer", "number"}:
        return False
    if types != {"object"}:
        return {"type": min(types), "allOf": [a, b]} if types else {"allOf": [a, b]}
    names = dict.fromkeys(name for each in (a, b) for name in each.get("properties", ()))
    members = {name: {"allOf": [_member(each, name) for each in (a, b)]} for name in names}
    required = dict.fromkeys(name for each in (a, b) for name in each.get("required", ()))
    is_closed = False in (a.get("additionalProperties"), b.get("additionalProperties"))
    others = {"additionalProperties": False} if is_closed else {}
    return {**a, **b, "properties": members, "required": list(required), **others}


def _member(schema: Mapping[str, Any], name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def argument_types(tool: Mapping[str, Any] | None) -> dict[str | None, frozenset[str]]:
    """Return the types that each argument may have by its name, and under None those of others."""
    if tool is None:
        return {}
    found: dict[str | None, frozenset[str]] = {}
    with suppress(UsageError):
        schema = arguments_schema(tool["function"])
        definitions = definitions_of(schema)
        for each in alternatives(schema, definitions):
            if isinstance(each, Mapping):
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
        elif (values := listed(each)) is not None:
            found |= set(map(type_of, values))
        else:
            found |= {each["type"]} if each.get("type") in ANY else ANY
    return frozenset(found)


def listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema lists, if it does."""
    values = (
        schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    )
    return values


def type_of(value: Any) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"))
    found = next((name for kind, name in kinds if isinstance(value, kind)), None)
    return found or ("null" if value is None else "object" if isinstance(value, dict) else "array")


@dataclass(frozen=True)
class Keyed:
    """Arguments one by one: `opening`, a name, `colon`, a value, `closing`; `comma` between two.

    quote: around texts; "" where a text is bare and all else is JSON. A quote of one character
    comes with Python's escapes, a longer one with none. has_python_words: True, False and None are
    written, too.
    """

    opening: str = ""
    colon: str = ""
    closing: str = ""
    comma: str = ""
    quote: str = ""
    has_python_words: bool = False

    @property
    def is_python(self) -> bool:
        return len(self.quote) == 1

    def written(self, arguments: Mapping[str, Any]) -> str:
        return self.comma.join(self._written(arguments))

    def _written(self, arguments: Mapping[str, Any]) -> Iterator[str]:
        for name, value in arguments.items():
            written = as_json(value)
            if isinstance(value, str) and not self.is_python:
                written = f"{self.quote}{value}{self.quote}"
            elif self.is_python and (value is None or isinstance(value, bool)):
                written = repr(value)
            yield f"{self.opening}{name}{self.colon}{written}{self.closing}"

    def meant(self, text: str, types: Collection[str]) -> str:
        """Return as JSON what is written as a value. types: those that its schema allows. A text
        that means no value of these types is the text that it is."""
        if types == TEXT or not types:
            return as_json(text)
        bare = text.strip()
        try:
            value = _literal(bare, self.quote)
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


def _literal(text: str, quote: str) -> Any:
    """Return a value in the spelling of JSON or Python; where texts have quotes of a format's own,
    also in these, or bare. Raises ValueError for what is none."""
    if not quote and text.startswith("'"):
        raise ValueError("a text")

    def as_token(found: re.Match[str]) -> str:
        own, double, single, sign, word, colon = found.groups()
        if sign is not None:
            return sign.translate(_SIGNS)
        if word is None:
            return as_json(own if own is not None else unescaped(double or single or ""))
        is_number = _NUMBER.fullmatch(word) is not None
        is_read = is_number or quote or word.lower() in _WORDS
        if not is_read or word.startswith((quote or '"', '"', "'")):
            raise ValueError("no value")
        token = word if is_number else as_json(_WORDS.get(word.lower(), word))
        if colon is not None:
            token = token if token.startswith('"') else as_json(token)
        return token + (colon or "")

    own = f"{re.escape(quote)}(.*?){re.escape(quote)}" if len(quote) > 1 else "(?!)()"
    return json.loads(re.sub(own + _TOKENS, as_token, text, flags=re.DOTALL))


# Texts in quotes, brackets and commas before closing ones, and words, which may be names.
_TOKENS = (
    r"""|"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'"""
    r"""|([\[\](){}]|,(?=\s*[\])}]))|([^\s,:\[\](){}]+)(\s*:)?"""
)
_SIGNS = str.maketrans("()", "[]", ",")
_HEX = "[0-9a-fA-F]"
_PAIR = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # one letter
_ESCAPE = re.compile(rf"\\({_PAIR}|u{_HEX}{{4}}|x{_HEX}{{2}}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


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
