"""Parts of reports: tables, machines, hashes, errors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge_spec.storage.measurements import known_sha256

Document = dict[str, Any]  # a report as JSON


class Table(NamedTuple):
    """styles: of rows in a terminal, such as "red"; further rows are plain."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()


Page = Iterator[str | Table]  # a report as text: its title, then its parts


def machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}."


def files_sha256(path: Path) -> str:
    """Return the sha256 of a file; of all names and hashes for a directory. Raises OSError."""
    if path.is_file():
        return known_sha256(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    hashed = [(each.relative_to(path).as_posix(), known_sha256(each)) for each in files]
    return hashlib.sha256(repr(hashed).encode()).hexdigest()


def describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
