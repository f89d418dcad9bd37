"""What the arguments of a call may be, as grammars of calls have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from edge_spec.text.grammar import JSON_STYLE, tell_passed_over

if TYPE_CHECKING:
    from edge_spec.text.json_schema import HeldSchema

# With one of them, a schema says what members an object may have.
_NAMING = (
    *("$ref", "allOf", "anyOf", "const", "enum", "if", "oneOf"),
    *("additionalProperties", "patternProperties", "properties", "propertyNames"),
)


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of the arguments, which are an object whatever the function's schema says.
    Those that it does not name are left out: a small model would make up more and more of them.

    What is in a tool's schema is often not the client's to change: keywords that cannot be held are
    passed over, unless the tool says strict: true. Raises UsageError for a schema that is none."""
    parameters = function.get("parameters")
    parameters = {} if parameters is None else parameters
    if isinstance(parameters, Mapping) and all(parameters.get(each) is None for each in _NAMING):
        parameters = {**parameters, "properties": {}}
    source = json.dumps(parameters)
    return _held_arguments(source, function["name"], function.get("strict") is True).schema


def in_style(schema: Mapping[str, Any]) -> str:
    """Returns a schema as Lark's %json takes it, with JSON written as elsewhere."""
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


@lru_cache(maxsize=256)
def _held_arguments(source: str, name: str, is_strict: bool) -> HeldSchema:
    from edge_spec.text.json_schema import held_schema

    place = f"the parameters of {name}"
    held = held_schema(json.loads(source), is_strict=is_strict, is_object=True, name=place)
    tell_passed_over(place, held)
    return held
