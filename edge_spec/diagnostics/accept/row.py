"""What a check of `edge-spec accept` has found: one row of its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from edge_spec.errors import cut


class Mark(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_MEASURED = "not measured"  # nothing is wrong: it was not asked for, not told, or no time


@dataclass(frozen=True)
class CheckRow:
    """check: the check's name; name: what of it; found: the reason, one line. numbers: as JSON has
    them, units in their names. seconds: that the whole check took."""

    check: str
    name: str
    mark: Mark
    found: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def of(self, check: str, seconds: float | None = None) -> CheckRow:
        return replace(self, check=check, seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mark": str(self.mark)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckRow:
        return cls(**{**values, "mark": Mark(values["mark"])})


# Rows as checks yield them: the runner adds the check's name.


def passed(name: str, found: str, **numbers: Any) -> CheckRow:
    return CheckRow("", name, Mark.PASSED, _one_line(found), numbers)


def failed(name: str, found: str, **numbers: Any) -> CheckRow:
    return CheckRow("", name, Mark.FAILED, _one_line(found), numbers)


def not_measured(name: str, found: str, **numbers: Any) -> CheckRow:
    return CheckRow("", name, Mark.NOT_MEASURED, _one_line(found), numbers)


def out_of_time(name: str, found: str) -> CheckRow:
    """Not measured, and what more minutes would change."""
    return not_measured(name, found, out_of_time=True)


def judged(name: str, is_right: bool, found: str, **numbers: Any) -> CheckRow:
    return (passed if is_right else failed)(name, found, **numbers)


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()))
