"""What a check of `edge-spec doctor` has to say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it can be used, with less than it could have
    FAULT = "fault"  # it cannot be used, or not relied on


@dataclass(frozen=True)
class Finding:
    """One line. remedy: what can be done about it; empty where all is well."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, found, remedy)


def fault(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.FAULT, found, remedy)
