"""Digests of large files: to hash a model of 8 billion parameters takes seconds, also where it is
opened every day and never changes.

What a file hashed to holds for as long as its device, inode, size and times are those it had then.
A file that changed moments before it was hashed may change once more at the same tick of the clock:
of such a one nothing is kept (as git does with its index).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from edge_spec.storage.atomic import sha256_file
from edge_spec.storage.measurements import Quantity

LARGE_BYTES = 16_000_000  # smaller files are hashed in less time than it takes to look them up
_SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system (FAT's) has ticks of 2 s


class _State(NamedTuple):
    """Changes with a file."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int
    modified_ns: int


_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_DIGEST: Quantity[_State, str] = Quantity("sha256", _State, TypeAdapter(_Sha256))


def known_sha256(path: Path) -> str:
    """Return the file's sha256, without hashing it where it has not changed since. Raises
    OSError."""
    before = _state(path)
    if before.num_bytes < LARGE_BYTES:
        return sha256_file(path)
    known = _DIGEST.known(before)
    if known is not None:
        return known
    hashed_ns = time.time_ns()
    digest = sha256_file(path)
    is_settled = max(before.changed_ns, before.modified_ns) + _SETTLED_NS < hashed_ns
    if is_settled and _state(path) == before:
        _DIGEST.keep(before, digest)
    return digest


def _state(path: Path) -> _State:
    found = path.stat()
    return _State(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns)
