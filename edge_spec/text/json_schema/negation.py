"""Says of a schema what does not fit it, as far as other schemas can say it."""

from __future__ import annotations

from typing import Any

from edge_spec.text.json_schema.document import Document, Node
from edge_spec.text.json_schema.scalars import is_number
from edge_spec.text.json_schema.shapes import TYPES

# Keywords of our own, that no JSON can have: members that there may not be; members that are not
# named by it; values that there may not be.
FORBIDDEN, MEMBERS, WITHOUT = object(), object(), object()

_TYPES = tuple(each for each in TYPES if each != "integer")
_OPPOSITE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


def negated(document: Document, node: Node) -> list[dict[Any, Any]] | None:
    """Schemas of which what does not fit `node` fits one. What cannot be said is left out, so that
    all that fits them does not fit `node`; None if nothing can be said."""
    given = document.given(node)
    found: list[dict[Any, Any]] = []
    is_said = not given
    for keyword, value in given.items():
        choices = _opposites(document, node, keyword, value)
        is_said = is_said or choices is not None
        found += choices or []
    return found if is_said else None


def _opposites(
    document: Document, node: Node, keyword: Any, value: Any
) -> list[dict[Any, Any]] | None:
    if keyword in _OPPOSITE:
        kind, other, step = _OPPOSITE[keyword]
        if not is_number(value) or (value + step < 0 and step < 0):
            return []
        return [{"type": kind, other: value + step}]
    if keyword == "type":
        types = value if isinstance(value, list) else [value]
        # Not whole numbers are numbers that no grammar describes: none are left.
        taken = {"number" if each == "integer" else each for each in types}
        return [{"type": [each for each in _TYPES if each not in taken]}]
    if keyword in ("const", "enum"):
        values = [value] if keyword == "const" else value
        if not isinstance(values, list) or any(isinstance(each, (list, dict)) for each in values):
            return None
        return [{WITHOUT: tuple(values)}]
    if keyword == "required" and isinstance(value, list):
        return [{"type": "object", FORBIDDEN: (name,)} for name in value]
    if keyword == "properties":
        return [
            {"type": "object", "required": [name], MEMBERS: {name: {"not": child.schema}}}
            for name, child in document.named(node, keyword).items()
        ]
    if keyword == "anyOf":
        return [{"allOf": [{"not": each.schema} for each in document.children(node, keyword)]}]
    if keyword == "allOf":
        return [{"not": each.schema} for each in document.children(node, keyword)]
    if keyword == "not":
        return [{"allOf": [value]}]
    if keyword == "$ref":
        return [{"not": document.target(node).schema}]
    return None
