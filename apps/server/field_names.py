"""What is done with members of a request that are no fields of it: other servers' names for fields
that it has, members that change no answer, and those of which only values that ask for nothing are
taken.

All else is refused by name. A member that would change the answer is never passed over, and of a
name that nobody knows nobody can tell whether it would.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic_core import PydanticCustomError

from edge_spec.models.option_values import meant

_SHOWN = 60  # characters of a name that a client made up
_ALIKE = 0.8  # of the letters of a name, from which on it is one of ours, mistyped
LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Off:
    """Values that ask for nothing, and what to do about others."""

    values: tuple[Any, ...] = ()
    way: str = LEAVE_OUT


@dataclass(frozen=True)
class OtherNames:
    """Says what members are that an object has no fields for.

    also: other servers' names of fields that are here, or in `off`. harmless: members that change
    no answer. keeps_others: of objects in which clients keep things of their own; a mistyped name
    is refused there, too.
    """

    also: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    off: Mapping[str, Off] = field(default_factory=dict)
    keeps_others: bool = False

    def read(self, given: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
        """Returns the members under the names that are `taken`. null is the same as left out, under
        any name. Raises PydanticCustomError for what is refused."""
        known = {name: value for name, value in given.items() if name in taken}
        for name, value in given.items():
            if name in taken or name in self.harmless or value is None:
                continue
            meaning = self.also.get(name, name)
            if meaning in taken:
                if known.get(meaning, value) not in (value, None):
                    raise refusal(name, f"is not what {meaning} says: send one of them")
                known[meaning] = value
            elif meaning in self.off:
                self._require_off(name, value, self.off[meaning])
            else:
                self._refuse_unknown(name, taken)
        return known

    def _require_off(self, name: str, value: Any, off: Off) -> None:
        for each in off.values:
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return
        raise refusal(name, f"is not supported: {off.way}")

    def _refuse_unknown(self, name: str, taken: Collection[str]) -> None:
        if self.keeps_others:
            near = get_close_matches(name, taken, n=1, cutoff=_ALIKE)
            found = near[0] if near else None
            if found is None:
                return
        else:
            found = meant(name, [*taken, *self.off, *self.harmless], self.also)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        way = LEAVE_OUT if found is None else f"is {found} meant?"
        raise refusal(shown, f"is no field that is known here: {way}")


def refusal(name: str | int, fault: str) -> PydanticCustomError:
    """Makes the error of a member of the object that is being read."""
    shown = name if isinstance(name, int) else readable(name)
    return PydanticCustomError("member", "{fault}", {"fault": readable(fault), "member": shown})


def readable(text: str) -> str:
    """Returns a text without halves of characters, which no error of pydantic can hold."""
    return text.encode("utf-8", "replace").decode()
