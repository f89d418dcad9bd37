"""Cache directories made once, such as a compiled bundle, and used while complete and of the wanted
key."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edge_spec.errors import BundleError
from edge_spec.models.bundle import (
    MANIFEST,
    Bundle,
    FileEntry,
    Stated,
    check_file,
    list_files,
    read_model,
)
from edge_spec.storage.atomic import atomic_directory, cache_directory, locked, sha256_file

ENTRY = "entry.json"
_REMEDY = "It is made again."

_log = logging.getLogger(__name__)


class _Entry(Stated):
    key: dict[str, Any]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class KeptDirectory:
    """A directory that is made once.

    key: all, as JSON, that its files depend on and its name does not show. A damaged directory, or
    one with another key, such as an older driver's, is removed. begins: called before making it.
    """

    path: Path
    key: Mapping[str, Any] = field(default_factory=dict)
    begins: Callable[[], None] = lambda: None

    def get(self, fill: Callable[[Path], None]) -> Path:
        """Return the directory, filled by `fill` now or before, in one process at a time. Raises
        StorageError, and what `fill` raises; nothing is kept then."""
        if self.path.is_dir() and self._problem() is None:
            return self.path  # also where locking is impossible
        with locked(self.path):
            is_there = self.path.is_dir()
            problem = self._problem() if is_there else None
            if problem is not None:
                self.drop(problem)
            if problem is not None or not is_there:
                self.begins()
                with atomic_directory(self.path) as work:
                    fill(work)
                    entry = _Entry(key=dict(self.key), files=list_files(work, work))
                    (work / ENTRY).write_text(entry.model_dump_json(indent=1), encoding="utf-8")
        return self.path

    def drop(self, why: object) -> None:
        _log.warning("%s is removed: %s", self.path, " ".join(str(why).split()))
        shutil.rmtree(self.path, ignore_errors=True)

    def _problem(self) -> str | None:
        try:
            entry = read_model(self.path / ENTRY, _Entry, _REMEDY)
            for name, file in entry.files.items():
                check_file(self.path, name, file)
        except (BundleError, OSError) as error:
            return f"it is damaged ({error})"
        others = [name for name in self.key if entry.key.get(name) != self.key[name]]
        made_for = ", ".join(f"{name} {entry.key.get(name)}" for name in others)
        return f"it was made for {made_for}" if others else None


def compiled_bundle(bundle: Bundle, device: str, key: Mapping[str, Any]) -> KeptDirectory:
    """Return where a bundle's compiled form is kept for a kind of device, such as "coreml". key:
    what it depends on besides the bundle, as JSON. Files are verified: OpenVINO accepts a graph
    with a flipped byte."""
    digest = sha256_file(bundle.path / MANIFEST)
    return KeptDirectory(
        cache_directory() / "compiled" / f"{digest[:16]}-{device}",
        {**key, "bundle": digest},
        partial(_log.warning, "compiling %s for %s (once)", bundle.path, device),
    )
