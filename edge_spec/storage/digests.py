"""The sha256 of large files, computed once for each state of a file.

To hash a model of 8 billion parameters takes seconds, also where it is opened every day and never
changes. What a file hashed to is kept in the cache and holds for as long as its device, inode, size
and times are those it had then. A file that changed moments before it was hashed may change once
more at the same tick of the clock: of such a one nothing is kept (as git does with its index).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from edge_spec.storage.atomic import cache_directory, sha256_file
from edge_spec.storage.json_store import KeptFile, require_sealed

LARGE_BYTES = 16_000_000  # smaller files are hashed in less time than it takes to look them up
_MAX_KEPT = 200
_SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system (FAT's) has ticks of 2 s


class _State(NamedTuple):
    """Holds what changes with a file."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int
    modified_ns: int


@dataclass(frozen=True)
class _Known:
    state: _State
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class _File:
    version: Literal[1]
    known: Annotated[tuple[_Known, ...], Field(max_length=_MAX_KEPT)]  # the latest last


_FILE = TypeAdapter(_File)


def known_sha256(path: Path) -> str:
    """The file's sha256, read from the cache where it has not changed since. Raises OSError."""
    before = _state(path)
    if before.num_bytes < LARGE_BYTES:
        return sha256_file(path)
    kept = KeptFile(cache_directory() / "digests" / "files.json", _FILE)
    file = kept.read()
    for known in file.known if file is not None else ():
        if known.state == before:
            return known.sha256
    hashed_ns = time.time_ns()
    digest = sha256_file(path)
    is_settled = max(before.changed_ns, before.modified_ns) + _SETTLED_NS < hashed_ns
    if is_settled and _state(path) == before:
        _keep(kept, _Known(before, digest))
    return digest


def check_digests(path: Path) -> None:
    """Raises ModelFileError for a file of digests that cannot be read, OSError."""
    require_sealed(path, _FILE, "digests")


def _state(path: Path) -> _State:
    found = path.stat()
    return _State(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns)


def _keep(kept: KeptFile[_File], known: _Known) -> None:
    def with_it(old: _File | None) -> _File:
        others = old.known if old is not None else ()
        same = (known.state.device, known.state.inode)
        others = tuple(each for each in others if each.state[:2] != same)
        return _File(1, (*others, known)[-_MAX_KEPT:])

    kept.keep(with_it)
