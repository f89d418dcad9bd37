"""Tool-call arguments: their schemas, and values written one by one as JSON, as Python, in a
model's own quotes, or bare."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from edge_spec.errors import UsageError
from edge_spec.text.grammar import JSON_STYLE

ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
TEXT = frozenset(("string",))
# Any of these keywords says which members an object may have.
_NAMING = (
    *("$ref", "allOf", "anyOf", "const", "enum", "if", "oneOf"),
    *("additionalProperties", "patternProperties", "properties", "propertyNames"),
)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Non-string words, in the spellings of JSON and Python, which models mix.
_JSON = {"true": "true", "false": "false", "none": "null", "null": "null"}
_PYTHON = {"true": "True", "false": "False", "none": "None", "null": "None"}
_WORD = r"(?<![\w.+-])([^\W\d][\w.-]*)(\s*:)?"  # in an object or array; a name if a colon follows
_TEXTS = r""""(?:\\.|[^"\\])*"|(?<!\w)'(?:\\.|[^'\\])*'"""
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, always an object.

    Unnamed arguments are excluded: small models would invent more and more. Clients often cannot
    change a tool's schema, so keywords that cannot be enforced are ignored unless it says strict:
    true. Raises UsageError.
    """
    from edge_spec.text.json_schema import held_schema

    parameters = function.get("parameters")
    parameters = {} if parameters is None else parameters
    if isinstance(parameters, Mapping) and all(parameters.get(each) is None for each in _NAMING):
        parameters = {**parameters, "properties": {}}
    place, is_strict = f"the parameters of {function['name']}", function.get("strict") is True
    held = held_schema(json.dumps(parameters), is_strict=is_strict, is_object=True, name=place)
    return held.schema


def as_lark(schema: Any, definitions: Mapping[str, Any] | None = None) -> str:
    """definitions: what the schema may refer to."""
    schema = dict(schema) if isinstance(schema, Mapping) else {"anyOf": [schema]}
    if definitions and '"$ref"' in json.dumps(schema):
        schema["$defs"] = dict(definitions)
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


def definitions_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("$defs")
    return found if isinstance(found, Mapping) else {}


def choices_of(
    schema: Any, definitions: Mapping[str, Any], seen: set[str] | None = None
) -> Iterator[Any]:
    """Yield a schema's alternatives without references, each of one type if known. seen:
    definitions already yielded."""
    seen = set() if seen is None else seen
    (key, *others) = schema if isinstance(schema, Mapping) and schema else ("", "")
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(types, list):
        yield from ({**schema, "type": each} for each in types)
    elif key == "$ref" and not others:
        name = str(schema[key]).rpartition("/")[2]
        if name not in seen:
            seen.add(name)
            yield from choices_of(definitions.get(name, True), definitions, seen)
    elif not others and (key == "anyOf" or (key == "allOf" and len(schema[key]) == 1)):
        for each in schema[key]:
            yield from choices_of(each, definitions, seen)
    elif schema is not False:
        yield schema


class Members(NamedTuple):
    """others: schema of unnamed members; False: none."""

    properties: dict[str, Any]
    required: set[str]
    others: Any


def members_of(schema: Any, definitions: Mapping[str, Any]) -> Members:
    """Return an object's members. A combined schema may allow any others."""
    if isinstance(schema, Mapping):
        keywords = {key: each for key, each in schema.items() if key not in ("type", "$defs")}
        found = list(choices_of(keywords, definitions))
        schema = found[0] if len(found) == 1 else schema
    if not isinstance(schema, Mapping):
        return Members({}, set(), schema)
    # With patterned names, only the listed ones are allowed.
    others = "patternProperties" not in schema and schema.get("additionalProperties", False)
    is_joined = not {"$ref", "allOf", "anyOf"}.isdisjoint(schema)
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    return Members(dict(properties), required, others or is_joined)


def argument_types(tool: Mapping[str, Any] | None) -> dict[str | None, frozenset[str]]:
    """Return the types of arguments by name; under None, of unnamed ones."""
    if tool is None:
        return {}
    with suppress(UsageError):
        schema = arguments_schema(tool["function"])
        definitions = definitions_of(schema)
        members = members_of(schema, definitions)
        named = [*members.properties.items(), (None, members.others)]
        return {name: types_of(value, definitions) for name, value in named}
    return {}


def types_of(schema: Any, definitions: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that fit a schema; all if unclear."""
    found: set[str] = set()
    for each in choices_of(schema, definitions):
        if not isinstance(each, Mapping):
            found |= ANY
        elif (values := listed(each)) is not None:
            found |= set(map(type_of, values))
        else:
            found |= {each["type"]} if each.get("type") in ANY else ANY
    return frozenset(found)


def listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values of enum or const, if any."""
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

    quote: around strings; "" if strings are bare and all else is JSON. One character implies
    Python's escapes, more imply none. has_python_words: True, False and None may occur.
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
        """Convert a written value to JSON; one of no type in `types` is a string."""
        if types == TEXT or not types:
            return as_json(text)
        bare = text.strip()
        try:
            value = _literal(bare, self.quote)
        except _NO_LITERAL:
            return as_json(text)
        kind = type_of(value)
        if isinstance(value, str) and "string" not in types:
            return self.meant(value, types) if value != text else as_json(text)
        if kind not in types and not (kind == "integer" and "number" in types):
            is_whole = kind == "number" and "integer" in types and value % 1 == 0
            if "string" in types and not is_whole:
                return as_json(text)
        return bare if _NUMBER.fullmatch(bare) else as_json(value)

    def meant_literal(self, text: str, types: Collection[str]) -> str:
        """Convert a written value to JSON; strings are quoted."""
        quote = next((each for each in (self.quote, '"', "'") if text.startswith(each)), "")
        if not quote:
            return self.meant(text, types)
        meant = text.removeprefix(quote).removesuffix(quote)
        if len(quote) == 1:
            with suppress(*_NO_LITERAL):
                meant = str(_literal(text, '"'))
        return as_json(meant) if "string" in types else self.meant(meant, types)


def _literal(text: str, quote: str) -> Any:
    """Parse JSON's or Python's spelling; in formats with own quotes, names and strings may be bare.
    Raises `_NO_LITERAL`."""
    try:
        value = json.loads(_spelled(text, quote, _JSON), strict=False, parse_constant=_refuse)
    except ValueError:
        if quote != '"' and not text.startswith(("[", "{")):
            raise
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes
            value = ast.literal_eval(_spelled(text, quote, _PYTHON))
    if not isinstance(value, float):
        json.dumps(value, allow_nan=False)
    return value


def _spelled(text: str, quote: str, words: Mapping[str, str]) -> str:
    """Spell non-string words as in `words`, and put standard quotes around other strings."""
    is_own = len(quote) > 1

    def as_token(found: re.Match[str]) -> str:
        own, word, colon = found.groups()
        if own is not None:
            return as_json(own)
        if word is None or (not colon and word.lower() in words):
            return found[0] if word is None else words[word.lower()]
        return as_json(word) + (colon or "") if is_own else found[0]

    own = f"{re.escape(quote)}(.*?){re.escape(quote)}" if is_own else "(?!)()"
    return re.sub(f"{own}|{_TEXTS}|{_WORD}", as_token, text, flags=re.DOTALL)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
