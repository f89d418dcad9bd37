"""Writes what commands print and keep: one JSON document, or files in the directory of --out."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

from edge_spec.errors import UsageError


def print_json(document: Mapping[str, Any]) -> None:
    """Prints it in one line, and all of it before whoever waits for it goes on."""
    print(dumps(document, ensure_ascii=False), flush=True)


def require_writable(directory: Path) -> None:
    """Makes the directory, if need be. Raises UsageError, now rather than when all is measured."""
    from tempfile import TemporaryFile

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {directory}: {error}", remedy="Give another directory to --out."
        ) from None
