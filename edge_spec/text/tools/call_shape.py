"""What calls of tools look like in a format."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edge_spec.text.plain_messages import meant_arguments
from edge_spec.text.tools.arguments import Keyed

NAME, ARGUMENTS, ID, INDEX = "$NAME", "$ARGUMENTS", "$ID", "$INDEX"  # slots of a call
SLOTS = re.compile(r"(\$(?:NAME|ARGUMENTS|ID|INDEX))")
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def marker_of(opening: str) -> str:
    """Return the part of what calls begin with that tells them from text."""
    tag = TAG.match(opening)
    return tag.group() if tag else opening.rstrip()


def new_id() -> str:
    """Return an id of nine letters and digits, since some templates take no other."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class CallShape:
    """Calls are `opening`, a call, further calls each after `between`, and `closing`.

    call: text with $NAME, $ARGUMENTS, $ID and $INDEX. The arguments are a JSON object, unless
    `keyed` says how they are written one by one. opening: "" or "[" where the calls are the whole
    answer. between: None where an answer has one call.
    """

    opening: str
    call: str
    between: str | None
    closing: str
    keyed: Keyed | None = None

    @property
    def is_bare(self) -> bool:
        """Return True if the calls are the whole answer: nothing else tells where they begin."""
        return self.opening in ("", "[")

    @property
    def is_object(self) -> bool:
        """Return True if a call is a JSON object with the name in it."""
        return self.call.startswith("{")

    @property
    def is_named(self) -> bool:
        """Return True if the object has the name and the arguments under names of their own."""
        return self.is_object and f': "{NAME}"' in self.call

    @cached_property
    def head(self) -> list[str]:
        """Return the literals and slots of a call before its arguments."""
        return [each for each in SLOTS.split(self.call.partition(ARGUMENTS)[0]) if each]

    @property
    def before_name(self) -> str:
        return "".join(self.head[: self.head.index(NAME)])

    @property
    def after_name(self) -> str:
        return "".join(self.head[self.head.index(NAME) + 1 :])

    @cached_property
    def marker(self) -> str:
        """Return what the first call begins with, and no text does."""
        if self.is_bare:
            return self.opening + self.head[0] if self.is_object else ""
        return marker_of(self.opening)

    @cached_property
    def openings(self) -> list[str]:
        """Return what calls begin with. Models leave out what is around all of them, such as the
        bracket of an array, or the outer one of two tags."""
        if self.is_bare:
            return []
        rest = self.opening.removeprefix(self.marker).lstrip()
        inner = rest if rest.startswith("<") else ""
        if self.is_object:
            inner = self.opening.rstrip("[ \n")
        return [each for each in dict.fromkeys((self.opening, inner)) if each.strip()]

    @property
    def inner_marker(self) -> str:
        """Return what begins a call of which the outer tag is missing, in a keyed format."""
        inner = self.openings[-1] if self.openings else ""
        return inner if self.keyed is not None and inner != self.opening else ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.marker,) if self.marker else ()

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls as messages have them."""
        between = f"{self.closing}\n{self.opening}" if self.between is None else self.between
        written = [self._written(index, call) for index, call in enumerate(calls)]
        return f"{self.opening}{between.join(written)}{self.closing}"

    def _written(self, index: int, call: Mapping[str, Any]) -> str:
        name: str = call["function"]["name"]
        given = call["function"].get("arguments", {})
        if self.keyed is not None:
            arguments = self.keyed.written(meant_arguments(given))
        else:
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        id = call.get("id") or new_id()
        slots: dict[str, str] = {NAME: name, ARGUMENTS: arguments, ID: id, INDEX: str(index)}
        return "".join(slots.get(piece, piece) for piece in SLOTS.split(self.call))
