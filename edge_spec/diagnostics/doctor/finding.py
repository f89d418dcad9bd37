"""What a check of `edge-spec doctor` has to say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from edge_spec.errors import cut


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # nothing is wrong: it is not known yet, or not there
    WARNING = "warning"  # it can be used, with less than it could have
    FAULT = "fault"  # it cannot be used, or not relied on


GROUPS = ("machine", "target", "draft", "pair", "memory", "speed", "caches")


@dataclass(frozen=True)
class Finding:
    """One line. remedy: what can be done about it; empty where all is well. group: of GROUPS."""

    check: str
    level: Severity
    found: str
    remedy: str = ""
    group: str = "target"

    def of(self, group: str) -> Finding:
        return replace(self, group=group)


# Each cuts what it found: a name within a file may be as long as the file.


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, cut(found))


def note(check: str, found: str, remedy: str = "") -> Finding:
    return Finding(check, Severity.NOTE, cut(found), remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, cut(found), remedy)


def fault(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.FAULT, cut(found), remedy)
