"""Makes of a JSON Schema as people's tools write them one that llguidance holds whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge_spec.errors import UsageError
from edge_spec.text.json_schema.document import CannotHoldError, Document
from edge_spec.text.json_schema.finite import num_levels, pruned
from edge_spec.text.json_schema.forms import Form, Objects
from edge_spec.text.json_schema.patterns import UnknownPatternError
from edge_spec.text.json_schema.reader import Reader
from edge_spec.text.json_schema.writer import Writer

MAX_LEVELS = 200  # llguidance reads definitions recursively: with 1,000 it runs out of stack


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
    document = Document(schema, is_strict=is_strict, name=name)
    reader = Reader(document)
    writer = Writer(document, reader)
    try:
        forms: tuple[Form, ...] = reader.forms((document.root,))
        if is_object:
            forms = tuple(form for form in forms if isinstance(form, Objects))
            if not forms:
                document.wrong("", "arguments are an object, and no object fits")
        root = writer.whole((document.root,), forms if is_object else None)
    except CannotHoldError as error:
        raise UsageError(
            f"answers cannot be held to {error}",
            remedy="Leave it out, or say strict: false, so that it is passed over.",
        ) from None
    except UnknownPatternError as error:
        document.wrong("", f"a pattern {error}")
    except RecursionError:
        document.wrong("", "too many levels")
    found = pruned(root, writer.definitions)
    if found is None:
        document.wrong("", "Unsatisfiable schema (nothing fits it)")
    if num_levels(found) > MAX_LEVELS:
        document.wrong("", f"more than {MAX_LEVELS} schemas within each other")
    return HeldSchema(found, tuple(document.passed_over))
