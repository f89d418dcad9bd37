"""Reports as files that may be handed on: as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from edge_spec.errors import UsageError
from edge_spec.storage.atomic import atomic_file


def require_writable(directory: Path) -> None:
    """Makes the directory, if need be. Raises UsageError, now rather than when all is measured."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {directory}: {error}", remedy="Give another directory to --out."
        ) from None


def write_report(directory: Path, document: Mapping[str, Any], markdown: str) -> None:
    """Writes report.md and report.json, each as a whole or not at all. Raises OSError."""
    with atomic_file(directory / "report.md") as file:
        file.write_text(markdown, encoding="utf-8", errors="replace")
    with atomic_file(directory / "report.json") as file:
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        file.write_text(text, encoding="utf-8", errors="replace")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table of Markdown; what would end a cell is replaced."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}."
