"""What a check of `edge-spec doctor` yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from edge_spec.errors import cut


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # nothing is wrong: it is not known yet, or not there
    WARNING = "warning"  # it can be used, with less than it could have
    FAULT = "fault"  # it cannot be used, or not relied on


GROUPS = ("machine", "target", "draft", "pair", "memory", "speed", "caches", "run")


@dataclass(frozen=True)
class Finding:
    """Says one thing that a check found, in one line. remedy: what can be done about it; empty
    where all is well. group: of GROUPS. numbers: as JSON has them, units in their names."""

    check: str
    level: Severity
    found: str
    remedy: str = ""
    group: str = "target"
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def of(self, group: str) -> Finding:
        return replace(self, group=group)


# Each cuts what it found: a name within a file may be as long as the file.


def ok(check: str, found: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.OK, cut(found), numbers=numbers)


def note(check: str, found: str, remedy: str = "", **numbers: Any) -> Finding:
    return Finding(check, Severity.NOTE, cut(found), remedy, numbers=numbers)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, cut(found), remedy)


def fault(check: str, found: str, remedy: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.FAULT, cut(found), remedy, numbers=numbers)


def judged(check: str, is_right: bool, found: str, remedy: str, **numbers: Any) -> Finding:
    """Returns a finding that is well, or a fault with its remedy."""
    return ok(check, found, **numbers) if is_right else fault(check, found, remedy, **numbers)


def of_error(error: Exception) -> str:
    """Returns what an error of a library is and says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
