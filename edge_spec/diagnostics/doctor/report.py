"""Findings of `edge-spec doctor`, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from edge_spec.diagnostics.report_files import Document, Page, Table, machine_line
from edge_spec.errors import EdgeSpecError, cut


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # nothing wrong: unknown yet, or absent
    WARNING = "warning"  # usable with limitations
    FAULT = "fault"  # unusable or unreliable


GROUPS = ("machine", "target", "draft", "pair", "memory", "speed", "caches", "run")
_COLORS = {Severity.FAULT: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


@dataclass(frozen=True)
class Finding:
    """One line about what a check found. remedy: empty if all is well. group: one of GROUPS.
    numbers: for JSON, with units in their names."""

    check: str
    level: Severity
    found: str
    remedy: str = ""
    group: str = "target"
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def of(self, group: str) -> Finding:
        return replace(self, group=group)


# These shorten `found`: a name in a file may be as long as the file.


def ok(check: str, found: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.OK, cut(found), numbers=numbers)


def note(check: str, found: str, remedy: str = "") -> Finding:
    return Finding(check, Severity.NOTE, cut(found), remedy)


def warning(check: str, found: str, remedy: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.WARNING, cut(found), remedy, numbers=numbers)


def fault(check: str, found: str, remedy: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.FAULT, cut(found), remedy, numbers=numbers)


def problem(check: str, error: EdgeSpecError | OSError) -> Finding:
    if isinstance(error, EdgeSpecError):
        return fault(check, error.shown, error.remedy)
    return fault(check, str(error), "Check the disk and the file's permissions.")


@dataclass
class Report:
    """examined: what the findings are about, for JSON. runtime: the target's; None if a start would
    refuse."""

    findings: list[Finding] = field(default_factory=list)
    examined: dict[str, Any] = field(default_factory=dict)
    runtime: str | None = None

    @property
    def verdict(self) -> str:
        levels = {finding.level for finding in self.findings}
        if Severity.FAULT in levels:
            return "faults"
        return "warnings" if Severity.WARNING in levels else "ok"

    def add(self, group: str, check: str, findings: Iterable[Finding]) -> None:
        """Add a check's findings, and an error that it raises."""
        try:
            self.findings.extend(each.of(group) for each in findings)
        except (EdgeSpecError, OSError) as error:
            self.findings.append(problem(check, error).of(group))


def document(report: Report) -> Document:
    """docs/cli.md lists the fields."""
    findings = [asdict(finding) for finding in report.findings]
    return {"verdict": report.verdict, "findings": findings, **report.examined}


def page(report: Report) -> Page:
    yield f"edge-spec doctor: {report.examined.get('target', {}).get('model', 'this machine')}"
    found = sorted(report.findings, key=lambda each: GROUPS.index(each.group))
    rows = [(each.group, each.check, each.level, _in_words(each)) for each in found]
    styles = [_COLORS.get(each.level, "") for each in found]
    yield Table(("group", "check", "level", "found"), rows, styles)
    yield machine_line(report.examined["machine"])
    levels = [each.level for each in found]
    counts = [
        f"{levels.count(level)} {level}{'' if levels.count(level) == 1 else 's'}"
        for level in (Severity.FAULT, Severity.WARNING, Severity.NOTE)
    ]
    works = ": it works" if "target" in report.examined else ""
    yield ", ".join(counts) + (
        ": it will not work like this" if report.verdict == "faults" else works
    )


def _in_words(finding: Finding) -> str:
    parts = (finding.found, finding.remedy)
    return " -> ".join(" ".join(part.split()) for part in parts if part)
