"""A run as one document, and that document for the terminal and as a page."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.diagnostics.accept.privacy import Privacy
from edge_spec.diagnostics.accept.row import CheckRow, Mark
from edge_spec.diagnostics.accept.runner import AcceptRun
from edge_spec.diagnostics.page import rendered
from edge_spec.fitting.devices import Device
from edge_spec.fitting.memory import format_bytes, free_bytes, total_bytes
from edge_spec.models.source import Source
from edge_spec.placement.machine import busy_share, describe_machine
from edge_spec.storage.atomic import atomic_file
from edge_spec.storage.digests import known_sha256

if TYPE_CHECKING:
    from rich.console import Console

Document = dict[str, Any]

SCHEMA, VERSION = "edge-spec-accept", 1  # raise VERSION when a field means something else
_TEMPLATE = Path(__file__).with_name("report.html")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_COLOURS = {Mark.PASSED: "green", Mark.FAILED: "red", Mark.NOT_MEASURED: "yellow"}


def model_of(source: Source) -> Document:
    """Its name and a sha256 of its files: of all names and hashes, for a directory."""
    path = source.path
    if path.is_file():
        return {"name": source.name, "sha256": known_sha256(path)}
    files = sorted(each for each in path.rglob("*") if each.is_file())
    hashed = [(each.relative_to(path).as_posix(), known_sha256(each)) for each in files]
    return {"name": source.name, "sha256": hashlib.sha256(repr(hashed).encode()).hexdigest()}


def machine_of(devices: Sequence[Device]) -> Document:
    """What is asked once, before anything runs."""
    return {
        **describe_machine(),
        "memory": {"total_bytes": total_bytes(), "free_bytes": free_bytes()},
        "busy_share": busy_share(),
        "drivers": _drivers(),
        "devices": [asdict(device) for device in devices],
    }


def _drivers() -> list[str]:
    """What the system tells of kernel drivers, a line each."""
    there = (path for path in _DRIVERS if path.exists())
    return [path.read_text("utf-8", "replace").partition("\n")[0].strip() for path in there]


def document(
    run: AcceptRun, machine: Mapping[str, Any], models: Mapping[str, Any], seconds: float
) -> Document:
    """docs/accept.md lists the fields. Nothing of the user's is in it but the models' names.

    models: "target" and "draft", as `model_of` has them.
    """
    request = run.request
    counts = count(run.rows)
    report = {
        "schema": SCHEMA,
        "version": VERSION,
        "verdict": _verdict(run, counts),
        **counts,
        "interrupted": run.interrupted,
        "minutes": run.seconds / 60,
        "seconds": seconds,
        "models": dict(models),
        "runtime": request.runtime,
        "device": request.device,
        "draft_runtime": request.draft_runtime if request.draft else None,
        "draft_device": request.draft_device,
        "machine": dict(machine),
        "rows": [row.to_dict() for row in run.rows],
    }
    named = [each for each in (request.model, request.draft) if each]
    cleaned: Document = Privacy(named).cleaned(_finite(report))
    return cleaned


def count(rows: Sequence[CheckRow]) -> dict[str, int]:
    marks = [row.mark for row in rows]
    return {str(mark).replace(" ", "_"): marks.count(mark) for mark in Mark}


def _verdict(run: AcceptRun, counts: Mapping[str, int]) -> str:
    if counts["failed"]:
        return "failed"
    short = any(row.numbers.get("out_of_time") for row in run.rows)
    return "incomplete" if short or run.interrupted or not counts["passed"] else "passed"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def summary(report: Document) -> str:
    passed, failed, left = report["passed"], report["failed"], report["not_measured"]
    told = f"{passed} passed, {failed} failed, {left} not measured"
    ended = "interrupted: " if report["interrupted"] else ""
    return f"{ended}{told}, in {report['seconds'] / 60:.1f} minutes"


def title(report: Document) -> str:
    target, draft = report["models"]["target"], report["models"].get("draft")
    told = f"{target['name']} on {report['runtime']} {report['device']}"
    return f"{told}, draft {draft['name']} on {report['draft_device'] or 'cpu'}" if draft else told


def write_report(report: Document, directory: Path) -> tuple[Path, Path]:
    """The page and the document, each as a whole or not at all. Raises OSError."""
    device = "".join(each if each.isalnum() else "-" for each in report["device"])
    name = f"accept-{report['models']['target']['name']}-{report['runtime']}-{device}"
    page, data = directory / f"{name}.html", directory / f"{name}.json"
    with atomic_file(page) as file:
        file.write_bytes(html_page(report).encode("utf-8", "xmlcharrefreplace"))
    with atomic_file(data) as file:
        text = json.dumps(report, ensure_ascii=True, indent=1, allow_nan=False)
        file.write_text(f"{text}\n", encoding="ascii")
    return page, data


def html_page(report: Document) -> str:
    """A page that needs nothing else; what drivers and files say is escaped."""
    return rendered(
        _TEMPLATE,
        report=report,
        title=title(report),
        summary=summary(report),
        groups=_groups(report),
        times=_times(report),
        size=_size,
    )


def _groups(report: Document) -> dict[str, list[Document]]:
    """The rows by their check, in the order in which they were made."""
    found: dict[str, list[Document]] = {}
    for row in report["rows"]:
        found.setdefault(row["check"], []).append(row)
    return found


def _times(report: Document) -> Document:
    """t(k) as a table: the widths of passes, and by context what each takes."""
    timed = [row for row in report["rows"] if row["check"] == "passes"]
    rows = [row for row in timed if "context_tokens" in row["numbers"]]
    by_context = {row["numbers"]["context_tokens"]: row["numbers"]["pass_ms"] for row in rows}
    widths = sorted({int(width) for found in by_context.values() for width in found})
    return {"widths": widths, "by_context": by_context}


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def print_report(report: Document, console: Console) -> None:
    """Folds in a terminal, however narrow, and nowhere else."""
    from rich.table import Table
    from rich.text import Text

    colour = {"passed": "green", "failed": "red"}.get(report["verdict"], "yellow")
    console.print(Text(_printable(title(report))))
    verdict = Text(report["verdict"].upper(), style=f"bold {colour}")
    console.print(verdict + Text(f"  {summary(report)}", style="not bold default"))
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for overflow in ("fold", "fold", "fold"):
        table.add_column(overflow=overflow)
    for row in report["rows"]:
        name = f"{row['check']}: {row['name']}"
        mark = Text(row["mark"], style=_COLOURS[Mark(row["mark"])])
        table.add_row(mark, Text(_printable(name)), Text(_printable(row["found"])))
    console.print(table)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
