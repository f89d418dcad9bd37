"""Findings of `edge-spec doctor`, as JSON for applications and as a page for issues."""

from __future__ import annotations

import getpass
import hashlib
import math
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from edge_spec.diagnostics.report_files import Page, Table, machine_line
from edge_spec.errors import EdgeSpecError, MissingDependencyError, cut
from edge_spec.models.source import Source
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.measurements import known_sha256


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # nothing is wrong: it is not known yet, or not there
    WARNING = "warning"  # it can be used, with less than it could have
    FAULT = "fault"  # it cannot be used, or not relied on


GROUPS = ("machine", "target", "draft", "pair", "memory", "speed", "caches", "run")


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


def note(check: str, found: str, remedy: str = "", **numbers: Any) -> Finding:
    return Finding(check, Severity.NOTE, cut(found), remedy, numbers=numbers)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, cut(found), remedy)


def fault(check: str, found: str, remedy: str, **numbers: Any) -> Finding:
    return Finding(check, Severity.FAULT, cut(found), remedy, numbers=numbers)


def judged(check: str, is_right: bool, found: str, remedy: str, **numbers: Any) -> Finding:
    return ok(check, found, **numbers) if is_right else fault(check, found, remedy, **numbers)


def capped(findings: Sequence[Finding], most: int = 3) -> Iterator[Finding]:
    """Yield the first few, and how many more there are."""
    yield from findings[:most]
    if len(findings) > most:
        yield replace(findings[most], found=f"{len(findings) - most} more like this")


def settled(name: str, found: Iterator[Finding]) -> list[Finding]:
    """Return the findings of a check; an error that it raises is one, too."""
    findings: list[Finding] = []
    try:
        findings.extend(found)
    except (EdgeSpecError, OSError) as error:
        findings.append(problem(name, error))
    return findings


def problem(name: str, error: EdgeSpecError | OSError) -> Finding:
    if not isinstance(error, EdgeSpecError):
        return fault(name, str(error), "Check the disk and the file's permissions.")
    if isinstance(error, MissingDependencyError):
        return warning(name, f"not checked: {error.shown}", error.remedy)
    return fault(name, error.shown, error.remedy)


_VERDICTS = {Severity.FAULT: "faults", Severity.WARNING: "warnings"}


@dataclass
class Report:
    """numbers: figures of the findings, for JSON. chosen: a `Chosen`, what opening the models would
    open; None where it would refuse."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    chosen: Any = None

    @property
    def verdict(self) -> str:
        levels = {finding.level for finding in self.findings}
        return next((name for level, name in _VERDICTS.items() if level in levels), "ok")

    @property
    def grouped(self) -> dict[str, list[Finding]]:
        found = {group: [f for f in self.findings if f.group == group] for group in GROUPS}
        return {group: findings for group, findings in found.items() if findings}

    def add(self, group: str, findings: Iterable[Finding]) -> None:
        self.findings += [finding.of(group) for finding in findings]


Document = dict[str, Any]

_SHORTEST_NAME = 3  # letters of a user's or a host's name: shorter ones are parts of words
# A path of a system: all but its last part goes. A quote or a space ends it, a colon begins it
# where a drive is named.
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/\s'\"`:;,()<>|]+){2,}[\\/]?")


def document(report: Report) -> Document:
    """Return the report as JSON has it, which has no NaN and no infinity: they become null.
    docs/doctor.md lists the fields."""
    findings = [asdict(finding) for finding in report.findings]
    found = {"verdict": report.verdict, "findings": findings, **report.numbers}
    made: Document = _change(found, _make_finite)
    return made


def public_document(report: Report, models: Iterable[str]) -> Document:
    """Return the document without the user's own paths and names: it is attached to an issue.
    models: as the user named them."""
    made: Document = _change(document(report), _cleaner(models))
    return made


def files_sha256(source: Source) -> str:
    """Return the sha256 of a model's file; of all names and hashes, for a directory. Raises
    OSError, and an EdgeSpecError where it cannot be fetched."""
    path = source.path
    if path.is_file():
        return known_sha256(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    hashed = [(each.relative_to(path).as_posix(), known_sha256(each)) for each in files]
    return hashlib.sha256(repr(hashed).encode()).hexdigest()


def page(document: Document) -> Page:
    """Describe what `document` returned, or what was read back from its JSON."""
    levels = [each["level"] for each in document["findings"]]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in map(str, Severity))
    rows = [
        (each["group"], each["check"], each["level"], f"{each['found']} {each['remedy']}".rstrip())
        for each in sorted(document["findings"], key=lambda each: GROUPS.index(each["group"]))
    ]
    return Page(
        f"edge-spec doctor: {document.get('target', {}).get('model', 'this machine')}",
        [
            f"{document['verdict']}: {counts}.",
            machine_line(document["machine"]),
            Table(("group", "check", "level", "found"), rows),
        ],
    )


def _change(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a document as JSON has it, with its keys and values changed."""
    if isinstance(value, Mapping):
        return {change(key): _change(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_change(each, change) for each in value]
    return change(value)


def _make_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cleaner(models: Iterable[str]) -> Callable[[Any], Any]:
    """Return what keeps only the last part of each path in a text, and removes the names of user
    and machine. models: as the user named them; of a path to one, its name stays."""
    folders = [Path.home(), Path.cwd(), cache_directory(), Path(sys.prefix)]
    folders.append(Path(tempfile.gettempdir()))
    for model in models:
        with suppress(OSError):
            folders += [Path(model).parent.absolute(), Path(model).parent.resolve()]
    places = {str(folder) for folder in folders if len(folder.parts) > 1}
    names = {Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(Exception):  # no such user: what is raised depends on the system
        names.add(getpass.getuser())
    # The name of root is everywhere, and nobody's.
    own = {name for name in names if len(name) >= _SHORTEST_NAME} - {"root", "localhost"}

    def clean(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for place in sorted(places, key=len, reverse=True):  # the longest first
            value = value.replace(place, "\u2026")
        value = _PATH.sub(
            lambda found: "\u2026/" + re.split(r"[\\/]", found[0].rstrip("\\/"))[-1], value
        )
        for name in sorted(own, key=len, reverse=True):
            value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "\u2026", value)
        return value

    return clean
