"""Directories of the cache with what was made once, such as what a device's compiler makes of a
bundle: each is used as long as it is whole and of the key that is wanted, else made again."""

from __future__ import annotations

import logging
import math
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

    key: all that its files depend on and its name does not tell, as JSON has it. One of another
    key, such as that of an older driver, is removed when it is met, and so is a damaged one.
    begins, waits: are called before it is made, and before another process is waited for.
    """

    path: Path
    key: Mapping[str, Any] = field(default_factory=dict)
    begins: Callable[[], None] = lambda: None
    waits: Callable[[], None] = lambda: None

    def get(self, fill: Callable[[Path], None]) -> Path:
        """Return the directory that `fill` has filled, now or before, by one process at a time.
        Raises StorageError, and what `fill` raises; nothing is kept then."""
        if self.path.is_dir() and self._problem() is None:
            return self.path  # also where no lock can be made
        with locked(self.path, math.inf, self.waits):
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
        """Remove the directory and say why."""
        _log.warning("%s is removed: %s", self.path, " ".join(str(why).split()))
        shutil.rmtree(self.path, ignore_errors=True)

    def _problem(self) -> str | None:
        """Say why what is there cannot be used."""
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
    """Return where the compiled form of a bundle is kept for one kind of device, such as "coreml".

    key: all that it depends on beside the bundle, as JSON has it. Its files are checked: OpenVINO
    takes a graph of which a byte was flipped.
    """
    digest = sha256_file(bundle.path / MANIFEST)
    return KeptDirectory(
        cache_directory() / "compiled" / f"{digest[:16]}-{device}",
        {**key, "bundle": digest},
        partial(_log.warning, "compiling %s for %s (once)", bundle.path, device),
        partial(_log.warning, "waiting for another process that compiles %s", bundle.path),
    )
