"""What a device's compiler makes of a bundle, kept in the cache."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from edge_spec.errors import BundleError
from edge_spec.models.bundle import (
    MANIFEST,
    Bundle,
    FileEntry,
    check_file,
    list_files,
    read_model,
)
from edge_spec.storage.atomic import atomic_directory, cache_directory, sha256_file, single_flight

_ENTRY = "entry.json"
_REMEDY = "It is compiled again."

_log = logging.getLogger(__name__)


class _Entry(BaseModel):
    key: dict[str, Any]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class CompiledBundle:
    """The compiled form of one bundle for one kind of device, such as "coreml".

    key: all that it depends on beside the bundle, as JSON has it. A form of another key, such as
    that of an older driver, is removed when it is met, and so is a damaged one: OpenVINO takes a
    graph of which a byte was flipped.
    """

    bundle: Bundle
    device: str
    key: Mapping[str, Any]

    @property
    def directory(self) -> Path:
        return cache_directory() / "compiled" / f"{self._digest[:16]}-{self.device}"

    def get(self, compile_into: Callable[[Path], None]) -> Path:
        """Return the directory that `compile_into` has filled, now or before, by one process at a
        time. Raises StorageError, and what `compile_into` raises; nothing is kept then."""
        with single_flight(self.directory, self._tell_wait):
            if not self._is_whole():
                _log.warning("compiling %s for %s (once)", self.bundle.path, self.device)
                with atomic_directory(self.directory) as work:
                    compile_into(work)
                    entry = _Entry(key=self._whole_key, files=list_files(work, work))
                    (work / _ENTRY).write_text(entry.model_dump_json(indent=1), encoding="utf-8")
        return self.directory

    def drop(self, why: object) -> None:
        """Remove the directory and say why."""
        _log.warning("%s is removed: %s", self.directory, " ".join(str(why).split()))
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _digest(self) -> str:
        return sha256_file(self.bundle.path / MANIFEST)

    @property
    def _whole_key(self) -> dict[str, Any]:
        return {**self.key, "bundle": self._digest}

    def _is_whole(self) -> bool:
        if not self.directory.is_dir():
            return False
        try:
            entry = read_model(self.directory / _ENTRY, _Entry, _REMEDY)
            for name, file in entry.files.items():
                check_file(self.directory, name, file)
        except (BundleError, OSError) as error:
            self.drop(f"it is damaged ({error})")
            return False
        wanted = self._whole_key
        others = [name for name in wanted if entry.key.get(name) != wanted[name]]
        if others:
            made_for = ", ".join(f"{name} {entry.key.get(name)}" for name in others)
            self.drop(f"it was compiled for {made_for}")
        return not others

    def _tell_wait(self) -> None:
        _log.warning("waiting for another process that compiles %s", self.bundle.path)
