"""Drafters that `distill` has trained for a model, kept where the model finds them by itself."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from edge_spec.models.source import Source
from edge_spec.storage.atomic import cache_directory

DIRECTORY = "drafters"  # in the cache
_REPORT, _LARGEST_REPORT = "report.json", 1_000_000  # bytes
_log = logging.getLogger(__name__)


def place_of(source: Source, kind: str) -> Path:
    """Returns where the drafter of a kind is kept for a model. Raises as `Source.identity` does."""
    return cache_directory() / DIRECTORY / f"{source.name}-{kind}-{source.identity}"


def trained_drafter(source: Source) -> Path | None:
    """Returns the one for this model that is forecast to pay most; None where none pays. Raises as
    `Source.identity` does."""
    folder = cache_directory() / DIRECTORY
    if not folder.is_dir():  # as nearly everywhere: nothing is read of the model
        return None
    found = {}
    for path in sorted(folder.glob(f"[!.]*-{source.identity}")):
        speedup = _forecast(path)
        if speedup is not None and speedup > 1:
            found[path] = speedup
    return max(found, key=found.__getitem__, default=None)


def _forecast(path: Path) -> float | None:
    """Returns None for a report that cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        with (path / _REPORT).open("rb") as file:
            found = json.loads(file.read(_LARGEST_REPORT))
        return float(found["forecast"]["speedup"]) if found["pays"] is True else None
    _log.debug("%s has no report that can be read", path)
    return None
