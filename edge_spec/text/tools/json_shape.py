"""What calls whose arguments are JSON look like in a form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from edge_spec.text.tools.call_object import Role
from edge_spec.text.tools.literals import TAG_PATTERN, Piece, Slot, shared_end
from edge_spec.text.tools.part_list import IdStyle

TAG, END_TAG = "<tool_call>", "</tool_call>"
_ROLES = {Slot.NAME: Role.NAME, Slot.ARGUMENTS: Role.ARGUMENTS, Slot.ID: Role.ID}
_KEY = re.compile(r'"(\w+)"\s*:\s*"?$')  # before the value of a member
_NAMED: tuple[Piece, ...] = ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}")


@dataclass(frozen=True)
class JsonShape:
    """Calls are `opening`, a call, further ones each after `between`, and `closing`.

    call: either a JSON object with the name and the arguments in it, or a name and then the
    arguments, which are one. opening: "" where the object is the whole answer, "[" where a list of
    them is. between: None where an answer has one call. first_index: the number of the first call,
    where calls are numbered.
    """

    opening: str = f"{TAG}\n"
    call: tuple[Piece, ...] = _NAMED
    between: str | None = f"\n{END_TAG}\n{TAG}\n"
    closing: str = f"\n{END_TAG}"
    ids: IdStyle = IdStyle.ANY
    first_index: int = 0

    @cached_property
    def is_object(self) -> bool:
        """Says whether a call is a JSON object with the name in it."""
        return isinstance(self.call[0], str) and self.call[0].startswith("{")

    @property
    def is_bare(self) -> bool:
        """Says whether the calls are the whole answer, and nothing else tells where they begin."""
        return self.opening.strip() in ("", "[")

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Returns what the members of the object say."""
        found = {}
        for before, slot in pairwise(self.call):
            key = _KEY.search(before) if isinstance(before, str) else None
            if key is not None and isinstance(slot, Slot) and slot in _ROLES:
                found[key[1]] = _ROLES[slot]
        return found

    @property
    def is_named(self) -> bool:
        """Says whether a call is an object that has the name and the arguments by these names."""
        roles = self.roles if self.is_object else {}
        return Role.NAME in roles.values() and Role.ARGUMENTS in roles.values()

    @property
    def is_keyed(self) -> bool:
        """Says whether the object's member is named as the function."""
        return self.is_object and Role.NAME not in self.roles.values()

    @cached_property
    def openings(self) -> list[str]:
        """Returns what calls begin with: models leave out what is around all of them, such as the
        bracket of an array."""
        if self.is_bare:
            return []
        found = [self.opening]
        if self.is_object:
            found.append(self.opening.rstrip("[ \n"))
        elif self.between:
            found.append(shared_end(self.opening, self.between))
        return [each for each in dict.fromkeys(found) if each.strip()]

    @cached_property
    def marker(self) -> str:
        """Returns what the first call begins with, and no text does."""
        if self.is_bare:
            return f"{self.opening}{self.call[0]}"
        return self.marker_of(self.opening)

    def marker_of(self, opening: str) -> str:
        tag = TAG_PATTERN.match(opening)
        return tag.group() if tag else opening.rstrip()

    def read_id(self, name: str, values: Mapping[Slot, str]) -> str | None:
        """Returns the id that the model wrote, if it did."""
        if self.ids is IdStyle.NAMED and Slot.INDEX in values:
            return f"functions.{name}:{values[Slot.INDEX]}"
        return values.get(Slot.ID)
