"""What calls look like whose arguments stand by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edge_spec.text.tools.arguments import arguments_schema
from edge_spec.text.tools.literals import TAG_PATTERN
from edge_spec.text.tools.value_style import ValueStyle, types_of

_TAG = re.compile(r"<[^<>]+>|<[^<>]+$|\[/?[A-Z_]+\]|[^<\[\s]+")


@dataclass(frozen=True)
class KeyedShape:
    """Calls are `opening`, a name, `head`, arguments, and `closing`, or else `between` and the name
    of the next one.

    Of an argument, there are `key_opening`, its name, `key_closing`, its value, `value_closing`;
    `comma` stands between two. plain_key_closing: stands before values that are no texts.
    between: None where an answer has one call. is_sorted: the arguments come in the order of their
    names.
    """

    opening: str
    head: str
    key_opening: str
    key_closing: str
    value_closing: str
    closing: str
    between: str | None = None
    comma: str = ""
    plain_key_closing: str | None = None
    style: ValueStyle = field(default_factory=ValueStyle)
    is_sorted: bool = False

    @property
    def is_bare(self) -> bool:
        """Says whether nothing but the name of a function begins a call."""
        return not re.search(r"\w", self.opening)

    @cached_property
    def marker(self) -> str:
        """Returns what the first call begins with, and no text does."""
        found = _TAG.search(self.opening)
        return "" if self.is_bare or found is None else found.group()

    @cached_property
    def inner_marker(self) -> str:
        """Returns what stands before the name within the marker's tag: models leave out the outer
        one. "" if there is but one."""
        start = self.opening.rfind("<")
        inner = self.opening[start:] if start > self.opening.find(self.marker) else ""
        return "" if inner.rstrip().endswith(">") else inner

    @cached_property
    def ends(self) -> list[str]:
        """Returns what may end a call, in order: signs, and tags."""
        signs = self.closing.strip().partition("<")[0]
        return [*signs, *TAG_PATTERN.findall(self.closing)]

    def before_value(self, is_text: bool) -> str:
        """Returns what stands between the name of an argument and its value."""
        plain = self.plain_key_closing
        return self.key_closing if is_text or plain is None else plain


def argument_types(tool: Mapping[str, Any]) -> dict[str | None, frozenset[str]]:
    """Returns the types that each argument may have by its name, and under None those of others."""
    schema = arguments_schema(tool["function"])
    definitions = schema.get("$defs", {})
    found: dict[str | None, frozenset[str]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if "$ref" in each:
            waiting.append(definitions[each["$ref"].rpartition("/")[2]])
        waiting += each.get("anyOf", ())
        members = each.get("properties", {}).items()
        for name, value in [*members, (None, each.get("additionalProperties", False))]:
            types = types_of(value, definitions)
            found[name] = found.get(name, frozenset()) | types
    return found
