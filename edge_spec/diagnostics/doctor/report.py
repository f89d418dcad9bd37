"""What the checks of `edge-spec doctor` yield, and that as JSON and Markdown, for applications and
for issues."""

from __future__ import annotations

import getpass
import hashlib
import math
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from edge_spec.diagnostics.report_files import machine_line, markdown_table
from edge_spec.errors import cut
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
    return ok(check, found, **numbers) if is_right else fault(check, found, remedy, **numbers)


def of_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


_VERDICTS = {Severity.FAULT: "faults", Severity.WARNING: "warnings"}


@dataclass
class Report:
    """numbers: what an application wants of the findings, for JSON. chosen: a `Chosen`, what
    opening the models would open; None where it would refuse."""

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
    """docs/doctor.md lists the fields. JSON has no NaN and no infinity: they become null."""
    findings = [asdict(finding) for finding in report.findings]
    told = {"verdict": report.verdict, "findings": findings, **report.numbers}
    made: Document = _changed(told, _finite)
    return made


def public_document(report: Report, models: Iterable[str]) -> Document:
    """Returns the document without paths and names of the user's own: it is attached to an issue.
    models: as the user named them."""
    made: Document = _changed(document(report), _cleaner(models))
    return made


def files_sha256(source: Source) -> str:
    """Returns the sha256 of a model's file; of all names and hashes, for a directory. Raises
    OSError, and an EdgeSpecError where it cannot be fetched."""
    path = source.path
    if path.is_file():
        return known_sha256(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    hashed = [(each.relative_to(path).as_posix(), known_sha256(each)) for each in files]
    return hashlib.sha256(repr(hashed).encode()).hexdigest()


def markdown(document: Document) -> str:
    """Renders what `document` returned, or what was read back from its JSON."""
    model = document.get("target", {}).get("model", "this machine")
    counts = [f["level"] for f in document["findings"]]
    told = ", ".join(f"{counts.count(level)} {level}" for level in map(str, Severity))
    lines = [f"# edge-spec doctor: {model}", "", f"{document['verdict']}: {told}.", ""]
    lines += [machine_line(document["machine"]), ""]
    rows = [
        (group, each["check"], each["level"], f"{each['found']} {each['remedy']}".rstrip())
        for group in GROUPS
        for each in document["findings"]
        if each["group"] == group
    ]
    lines += markdown_table(("group", "check", "level", "found"), rows)
    return "\n".join(lines) + "\n"


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A document as JSON has it, with its keys and values changed."""
    if isinstance(value, Mapping):
        return {change(key): _changed(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(each, change) for each in value]
    return change(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cleaner(models: Iterable[str]) -> Callable[[Any], Any]:
    """Returns what keeps of a text the last part of each path, and nothing of the names of user and
    machine. models: as the user named them; of a path to one, its name stays."""
    found = [Path.home(), Path.cwd(), cache_directory(), Path(sys.prefix)]
    found.append(Path(tempfile.gettempdir()))
    for model in models:
        with suppress(OSError):
            found += [Path(model).parent.absolute(), Path(model).parent.resolve()]
    places = {str(place) for place in found if len(place.parts) > 1}
    names = sorted(_own_names(), key=len, reverse=True)

    def cleaned(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for place in sorted(places, key=len, reverse=True):  # the longest first
            value = value.replace(place, "\u2026")
        value = _PATH.sub(_last_part, value)
        for name in names:
            value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "\u2026", value)
        return value

    return cleaned


def _last_part(match: re.Match[str]) -> str:
    return "\u2026/" + re.split(r"[\\/]", match[0].rstrip("\\/"))[-1]


def _own_names() -> set[str]:
    names = {Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(Exception):  # no such user: what is raised depends on the system
        names.add(getpass.getuser())
    # The name of root is everywhere, and nobody's.
    return {name for name in names if len(name) >= _SHORTEST_NAME} - {"root", "localhost"}
