"""Graphs as they were compiled for an NPU, kept on disk: to compile them takes minutes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from edge_spec.models.bundle import MANIFEST, Bundle
from edge_spec.storage.atomic import atomic_directory, cache_directory, sha256_file, single_flight

_ENTRY = "entry.json"
_MAX_ENTRY_BYTES = 1_000_000

_log = logging.getLogger(__name__)


class CompiledGraphs:
    """The entry of one bundle and one kind of device.

    key: all that compiled graphs depend on, as JSON has it. An entry of another key, such as that
    of an older driver, is removed when it is met, and so is a damaged one.
    """

    def __init__(self, bundle: Bundle, device: str, key: Mapping[str, Any]) -> None:
        self._bundle = bundle
        digest = sha256_file(bundle.path / MANIFEST)
        self._key = {**key, "bundle": digest}
        self.directory = cache_directory() / "compiled" / f"{digest[:16]}-openvino-{device}"

    def get(self, compile_all: Callable[[], Mapping[str, bytes]]) -> dict[str, bytes]:
        """Returns the graphs by their functions' names, from the disk or compiled now, by one
        process at a time. Raises StorageError, and what `compile_all` raises; nothing is kept
        then."""
        with single_flight(self.directory, self._tell_wait):
            found = self._read()
            if found is None:
                _log.warning("compiling %s for the NPU (once)", self._bundle.path)
                found = dict(compile_all())
                self._write(found)
        return found

    def drop(self, why: object) -> None:
        """Removes the entry and says why."""
        _log.warning("%s is removed: %s", self.directory, " ".join(str(why).split()))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read(self) -> dict[str, bytes] | None:
        if not self.directory.is_dir():
            return None
        try:
            with (self.directory / _ENTRY).open("rb") as file:
                entry = json.loads(file.read(_MAX_ENTRY_BYTES))
            if entry["key"] != self._key:
                found, wanted = entry["key"], self._key
                others = [name for name in wanted if found.get(name) != wanted[name]]
                made_for = ", ".join(f"{name} {found.get(name)}" for name in others)
                self.drop(f"it was compiled for {made_for}")
                return None
            return {
                name: _checked(self.directory, name, digest)
                for name, digest in entry["graphs"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.drop(f"it is damaged ({error!r:.200})")
        return None

    def _write(self, graphs: Mapping[str, bytes]) -> None:
        digests = {name: sha256(content).hexdigest() for name, content in graphs.items()}
        with atomic_directory(self.directory) as work:
            for name, content in graphs.items():
                _file(work, name).write_bytes(content)
            entry = {"key": self._key, "graphs": digests}
            (work / _ENTRY).write_text(json.dumps(entry, indent=1), encoding="utf-8")

    def _tell_wait(self) -> None:
        _log.warning("waiting for another process that compiles %s", self._bundle.path)


def _file(directory: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"a graph called {name!r}")
    return directory / f"{name}.blob"


def _checked(directory: Path, name: str, digest: str) -> bytes:
    """OpenVINO takes a graph of which a byte was flipped. Raises ValueError, OSError."""
    content = _file(directory, name).read_bytes()
    if sha256(content).hexdigest() != digest:
        raise ValueError(f"{name} has changed")
    return content
