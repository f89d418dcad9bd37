"""Reports as pages of text and tables, and as the files that are handed on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from edge_spec.errors import UsageError
from edge_spec.storage.atomic import atomic_file
from edge_spec.storage.measurements import known_sha256

Document = dict[str, Any]  # of a report, as JSON has it


class Table(NamedTuple):
    """styles: of the rows in a terminal, such as "red"; those without one are plain."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table as Markdown; what would end a cell is replaced."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        cells = ([cell.replace("|", "/") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


class Page(NamedTuple):
    title: str
    parts: Sequence[str | Table]

    def markdown(self) -> str:
        parts = [each if isinstance(each, str) else each.markdown() for each in self.parts]
        return "\n\n".join([f"# {self.title}", *parts]) + "\n"


def require_writable(directory: Path) -> None:
    """Make the directory, if need be. Raises UsageError, now rather than when all is measured."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {directory}: {error}", remedy="Give another directory to --out."
        ) from None


def write_report(directory: Path, document: Mapping[str, Any], page: Page) -> None:
    """Write report.md and report.json, each as a whole or not at all. Raises OSError."""
    made = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    for name, text in (("report.md", page.markdown()), ("report.json", made)):
        with atomic_file(directory / name) as file:
            file.write_text(text, encoding="utf-8", errors="replace")


def machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}."


def files_sha256(path: Path) -> str:
    """Return the sha256 of a model's file; of all names and hashes, for a directory. Raises
    OSError."""
    if path.is_file():
        return known_sha256(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    hashed = [(each.relative_to(path).as_posix(), known_sha256(each)) for each in files]
    return hashlib.sha256(repr(hashed).encode()).hexdigest()


def describe_error(error: Exception) -> str:
    """Return one line of a library's own error, in which anything may be."""
    return " ".join(f"{type(error).__name__}: {error}".split())
