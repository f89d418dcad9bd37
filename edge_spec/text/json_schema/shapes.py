"""What values the keywords of a JSON Schema have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edge_spec.text.json_schema.scalars import is_number

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_MAX_VALUES = 20_000
_MAX_PATTERN = 20_000  # characters
_MAX_PATTERNS = 100  # of members' names: llguidance compares each with each
_MAX_LENGTH = 100_000  # that a string has to have


def _is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_types(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(each, str) and each in TYPES for each in types)


def _has_lists(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_names, value.values()))


def _has_either(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_names(each) or _is_schema(each) for each in value.values()
    )


Shape = tuple[Callable[[Any], bool], str]
_SCHEMA: Shape = (_is_schema, "is a schema, an object or a truth value,")
_SCHEMAS: Shape = (lambda value: isinstance(value, list), "is a list of schemas")
_NAMED: Shape = (lambda value: isinstance(value, Mapping), "has schemas by names")
_COUNT: Shape = (_is_count, "is a whole number of 0 or more")
_NUMBER: Shape = (is_number, "is a number")
_BOUND: Shape = (lambda value: is_number(value) or isinstance(value, bool), "is a number")
_TEXT: Shape = (lambda value: isinstance(value, str), "is a string")
_FLAG: Shape = (lambda value: isinstance(value, bool), "is true or false")
_SHAPES: Mapping[Any, Shape] = {
    "type": (_is_types, f"is one of {', '.join(TYPES)}, or a list of these,"),
    "enum": (
        lambda value: isinstance(value, list) and len(value) <= _MAX_VALUES,
        f"is a list of values, at most {_MAX_VALUES},",
    ),
    "required": (_is_names, "is a list of names"),
    "multipleOf": (lambda value: is_number(value) and value != 0, "is a number, not 0"),
    "pattern": (
        lambda value: isinstance(value, str) and len(value) <= _MAX_PATTERN,
        f"is a string of at most {_MAX_PATTERN} characters",
    ),
    "minLength": (
        lambda value: _is_count(value) and value <= _MAX_LENGTH,
        f"is a whole number of 0 to {_MAX_LENGTH}",
    ),
    "patternProperties": (
        lambda value: isinstance(value, Mapping) and len(value) <= _MAX_PATTERNS,
        f"has schemas by patterns, at most {_MAX_PATTERNS},",
    ),
    "items": (lambda value: _is_schema(value) or isinstance(value, list), "is a schema"),
    "dependentRequired": (_has_lists, "has lists of names by names"),
    "dependencies": (_has_either, "has lists or schemas by names"),
    **dict.fromkeys(("properties", "dependentSchemas"), _NAMED),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("minItems", "maxItems", "maxLength", "maxContains"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    **dict.fromkeys(("format", "$ref"), _TEXT),
    **dict.fromkeys(("nullable", "uniqueItems"), _FLAG),
    **dict.fromkeys(("additionalProperties", "propertyNames", "unevaluatedProperties"), _SCHEMA),
    **dict.fromkeys(("additionalItems", "contains", "unevaluatedItems"), _SCHEMA),
    **dict.fromkeys(("else", "if", "not", "then"), _SCHEMA),
}
# PHP writes an empty list where an empty object is meant.
_BY_NAME = ("properties", "patternProperties", "dependentRequired", "dependentSchemas")


def meant(keyword: Any, value: Any) -> Any:
    return {} if keyword in _BY_NAME and value == [] else value


def fault(keyword: Any, value: Any) -> str | None:
    """Says what is wrong with the value; None if nothing is."""
    is_right, told = _SHAPES.get(keyword, (lambda value: True, ""))
    return None if is_right(value) else f"{keyword} {told}"
