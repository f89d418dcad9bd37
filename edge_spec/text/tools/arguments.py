"""Arguments of calls: their schema, as grammars and readers have it, and their values where they
are written one by one: as JSON, as Python, in quotes of a model's own, or as bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_spec.errors import UsageError
from edge_spec.text.grammar import JSON_STYLE, tell_passed_over

if TYPE_CHECKING:
    from edge_spec.text.json_schema import HeldSchema

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


def choices_of(
    schema: Any, definitions: Mapping[str, Any], seen: set[str] | None = None
) -> Iterator[Any]:
    """Yield the schemas that a schema chooses from, without references, each of one type where that
    is known. seen: definitions that were yielded before, each of which is one choice."""
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
    """The members of an object. others: the schema of those without a name; False: none."""

    properties: dict[str, Any]
    required: set[str]
    others: Any


def members_of(schema: Any, definitions: Mapping[str, Any]) -> Members:
    """Return the members of objects that fit a schema. Of several schemas to choose from, those of
    all; required is what each requires."""
    ways, required, others = _members_of(schema, definitions, {})
    properties = {name: {"anyOf": each} if each[1:] else each[0] for name, each in ways.items()}
    return Members(properties, required, others)


_Ways = tuple[dict[str, list[Any]], set[str], Any]  # Members, each with the schemas it may have


def _members_of(schema: Any, definitions: Mapping[str, Any], known: dict[str, _Ways]) -> _Ways:
    """known: what was found of definitions, by their names; nothing within themselves."""
    if not isinstance(schema, Mapping):
        return {}, set(), schema
    properties = {name: [each] for name, each in (schema.get("properties") or {}).items()}
    required = set(schema.get("required") or ())
    # Where names have patterns, those that the schema lists are the only ones.
    others = "patternProperties" not in schema and schema.get("additionalProperties", False)
    parts = [[each] for each in schema.get("allOf", ())]
    parts += [schema["anyOf"]] if "anyOf" in schema else []
    found = [[_members_of(each, definitions, known) for each in part] for part in parts]
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        if name not in known:
            known[name] = {}, set(), False
            known[name] = _members_of(definitions.get(name, True), definitions, known)
        found.append([known[name]])
    for choices in found:
        ways: dict[str, list[Any]] = {}
        for own, _, own_others in choices:
            others = others or own_others
            for member, each in own.items():
                told = ways.setdefault(member, [])
                told += [way for way in each if way not in told]
        # What one part says of a member holds, unless it says nothing.
        properties |= {n: each for n, each in ways.items() if properties.get(n, [True]) == [True]}
        required |= set.intersection(*(needed for _, needed, _ in choices)) if choices else set()
    return properties, required, others


def argument_types(tool: Mapping[str, Any] | None) -> dict[str | None, frozenset[str]]:
    """Return the types that each argument may have by its name, and under None those of others."""
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
    """Return the types of what fits a schema; any where that is not plain."""
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
