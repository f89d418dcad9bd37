"""The schema of a call's arguments, as grammars and readers of calls have it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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
    schema: Any, definitions: Mapping[str, Any], seen: set[str] | None = None
) -> Iterator[Any]:
    """Yield the schemas that a schema chooses from, each of one type where that is known: mappings
    without references, unions and lists of types; True for anything, False for nothing."""
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping):
        yield schema is not False
        return
    chosen = next((schema[name] for name in ("anyOf", "oneOf") if schema.get(name)), None)
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        chosen = [] if name in seen else [definitions.get(name, True)]
        seen.add(name)
    elif isinstance(schema.get("type"), list):
        chosen = [{**schema, "type": each} for each in schema["type"]]
    if not isinstance(chosen, list):
        yield schema
        return
    for each in chosen:
        yield from alternatives(each, definitions, seen)


def argument_types(tool: Mapping[str, Any] | None) -> dict[str | None, frozenset[str]]:
    """Return the types that each argument may have by its name, and under None those of others."""
    if tool is None:
        return {}
    try:
        schema = arguments_schema(tool["function"])
    except UsageError:
        return {}
    definitions = definitions_of(schema)
    found: dict[str | None, frozenset[str]] = {}
    for each in alternatives(schema, definitions):
        if not isinstance(each, Mapping):
            continue
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
