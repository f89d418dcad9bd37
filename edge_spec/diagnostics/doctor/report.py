"""Findings of `edge-spec doctor`: as JSON for applications, as a page for people and issues."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from edge_spec.diagnostics.report_files import Document, Page, Table, machine_line
from edge_spec.errors import EdgeSpecError, cut


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # nothing is wrong: it is not known yet, or not there
    WARNING = "warning"  # it can be used, with less than it could have
    FAULT = "fault"  # it cannot be used, or not relied on


GROUPS = ("machine", "target", "draft", "pair", "memory", "speed", "caches", "run")
_COLORS = {Severity.FAULT: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


@dataclass(frozen=True)
class Finding:
    """One thing that a check found, in one line. remedy: what can be done about it; empty
    where all is well. group: of GROUPS. numbers: as JSON has them, units in their names."""

    check: str
    level: Severity
    found: str
    remedy: str = ""
    group: str = "target"
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def of(self, group: str) -> Finding:
        return replace(self, group=group)


# These cut what was found: a name within a file may be as long as the file.


def ok(check: str, found: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.OK, cut(found), numbers=numbers)


def note(check: str, found: str, remedy: str = "") -> Finding:
    return Finding(check, Severity.NOTE, cut(found), remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, cut(found), remedy)


def fault(check: str, found: str, remedy: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.FAULT, cut(found), remedy, numbers=numbers)


def problem(check: str, error: EdgeSpecError | OSError) -> Finding:
    if isinstance(error, EdgeSpecError):
        return fault(check, error.shown, error.remedy)
    return fault(check, str(error), "Check the disk and the file's permissions.")


@dataclass
class Report:
    """numbers: figures of the findings, for JSON. runtime: of the target, None where a start would
    refuse."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    runtime: str | None = None

    @property
    def verdict(self) -> str:
        levels = {finding.level for finding in self.findings}
        if Severity.FAULT in levels:
            return "faults"
        return "warnings" if Severity.WARNING in levels else "ok"

    def add(self, group: str, check: str, findings: Iterable[Finding]) -> None:
        """Add what a check finds; an error that it raises is a finding, too."""
        try:
            self.findings.extend(each.of(group) for each in findings)
        except (EdgeSpecError, OSError) as error:
            self.findings.append(problem(check, error).of(group))


def document(report: Report) -> Document:
    """Return the report as JSON has it. docs/doctor.md lists the fields."""
    findings = [asdict(finding) for finding in report.findings]
    return {"verdict": report.verdict, "findings": findings, **report.numbers}


def page(document: Document) -> Page:
    """Describe what `document` returned, or what was read back from its JSON."""
    levels = [each["level"] for each in document["findings"]]
    counts = [
        f"{levels.count(level)} {level}{'' if levels.count(level) == 1 else 's'}"
        for level in (Severity.FAULT, Severity.WARNING, Severity.NOTE)
    ]
    works = ": it works" if "target" in document else ""
    if document["verdict"] == "faults":
        works = ": it will not work like this"
    found = sorted(document["findings"], key=lambda each: GROUPS.index(each["group"]))
    rows = [
        (
            *(each[name] for name in ("group", "check", "level")),
            _told(each["found"], each["remedy"]),
        )
        for each in found
    ]
    styles = [_COLORS.get(each["level"], "") for each in found]
    return Page(
        f"edge-spec doctor: {document.get('target', {}).get('model', 'this machine')}",
        [
            Table(("group", "check", "level", "found"), rows, styles),
            machine_line(document["machine"]),
            f"{', '.join(counts)}{works}",
        ],
    )


def _told(found: str, remedy: str) -> str:
    return " -> ".join(" ".join(part.split()) for part in (found, remedy) if part)


_SHORTEST_NAME = 3  # letters of a user's or a host's name: shorter ones are parts of words
# A path of a system: all but its last part goes. A quote or a space ends it, a colon begins it
# where a drive is named.
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/\s'\"`:;,()<>|]+){2,}[\\/]?")


def public_document(report: Report) -> Document:
    """Return the document without the user's own paths and names: it is attached to an issue."""
    home = Path.home()
    names = {home.name, socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(Exception):  # no such user: what is raised depends on the system
        names.add(getpass.getuser())
    # The name of root is everywhere, and nobody's.
    own = {name for name in names if len(name) >= _SHORTEST_NAME} - {"root", "localhost"}

    def clean(text: str) -> str:
        if len(home.parts) > 1:
            text = text.replace(str(home), "\u2026")
        text = _PATH.sub(
            lambda found: "\u2026/" + re.split(r"[\\/]", found[0].rstrip("\\/"))[-1], text
        )
        for name in sorted(own, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "\u2026", text)
        return text

    cleaned: Document = _change(document(report), clean)
    return cleaned


def _change(value: Any, clean: Callable[[str], str]) -> Any:
    """Return a document with all texts in it changed."""
    if isinstance(value, Mapping):
        return {_change(key, clean): _change(each, clean) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_change(each, clean) for each in value]
    return clean(value) if isinstance(value, str) else value
