"""An examination as one document, and that document as Markdown."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from edge_spec.diagnostics.doctor.diagnose import Report
from edge_spec.diagnostics.doctor.finding import GROUPS, Severity
from edge_spec.diagnostics.privacy import Privacy
from edge_spec.diagnostics.report_files import machine_line, markdown_table
from edge_spec.models.source import Source
from edge_spec.storage.digests import known_sha256

Document = dict[str, Any]


def document(report: Report) -> Document:
    """docs/doctor.md lists the fields. JSON has no NaN and no infinity: they become null."""
    findings = [asdict(finding) for finding in report.findings]
    made: Document = _finite({"verdict": report.verdict, "findings": findings, **report.numbers})
    return made


def public_document(report: Report, models: Iterable[str]) -> Document:
    """Returns the document without paths and names of the user's own: it is attached to an issue.
    models: as the user named them."""
    cleaned: Document = Privacy(models).cleaned(document(report))
    return cleaned


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


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
