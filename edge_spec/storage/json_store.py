"""JSON that edge-spec keeps for itself: sealed with a checksum, versioned by its content's type,
replaced whole, one process at a time.

The first line of a sealed file is `{"sha256": "DIGEST",`; the digest is that of an opening brace
and all lines after the first. The whole is a JSON object.

Digests of large files are kept so, too: to hash a model of 8 billion parameters takes seconds, also
where it is opened every day and never changes. What a file hashed to holds for as long as its
device, inode, size and times are those it had then. A file that changed moments before it was
hashed may change once more at the same tick of the clock: of such a one nothing is kept (as git
does with its index).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from edge_spec.errors import ModelFileError
from edge_spec.storage.atomic import atomic_file, cache_directory, locked, sha256_file

MAX_FILE_BYTES = 4_000_000
LOCK_S = 10.0  # after which another process is taken to hang
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')

_log = logging.getLogger(__name__)
_Content = TypeVar("_Content")
LARGE_BYTES = 16_000_000  # smaller files are hashed in less time than it takes to look them up
_MAX_KEPT = 200  # digests
_SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system (FAT's) has ticks of 2 s


class DamagedError(ValueError):
    """The text says in one line what is wrong with a file."""


def write_sealed(
    path: Path, kind: TypeAdapter[_Content], content: _Content, mode: int = 0o644
) -> None:
    """kind: of a JSON object with at least one field; mode: of the file. Raises OSError, and then
    the old file is as it was."""
    body = kind.dump_json(content, indent=1)[1:].lstrip() + b"\n"
    digest = hashlib.sha256(b"{" + body).hexdigest().encode()
    with atomic_file(path, mode) as work:
        work.write_bytes(b'{"sha256": "' + digest + b'",\n' + body)


def read_sealed(path: Path, kind: TypeAdapter[_Content], *, required: bool = True) -> _Content:
    """required: whether a file without a seal, as a person may write one, is damaged.

    Raises DamagedError, OSError.
    """
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise DamagedError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    seal = _SEAL.match(raw)
    if seal is not None:
        body = b"{" + raw[seal.end() :]
        if hashlib.sha256(body).hexdigest() != seal[1].decode():
            raise DamagedError("its sha256 differs")
    elif required:
        raise DamagedError("it has no sha256")
    else:
        body = raw
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise DamagedError(f"{where}: {first['msg']}") from None


def require_sealed(path: Path, kind: TypeAdapter[_Content], what: str) -> _Content:
    """Reads a file of the cache for a look at it. what: it holds, for the message. Raises
    ModelFileError, OSError."""
    try:
        return read_sealed(path, kind)
    except DamagedError as error:
        raise ModelFileError(
            f"{path} holds no {what} of this version: {error}", remedy="Delete it."
        ) from None


@dataclass(frozen=True)
class KeptFile(Generic[_Content]):
    """One such file in the cache."""

    path: Path
    kind: TypeAdapter[_Content]

    def read(self) -> _Content | None:
        """Returns None if there is no file, or no readable one, which one line says; a damaged one
        is removed."""
        found = self._tried()
        if isinstance(found, DamagedError):
            try:
                with locked(self.path, LOCK_S):
                    return self._checked()
            except OSError:  # nothing can be written here, so nothing is removed
                self._tell(found)
                return None
        return found

    def update(self, change: Callable[[_Content | None], _Content]) -> _Content:
        """Writes what `change` makes of what is there. Raises OSError."""
        with locked(self.path, LOCK_S):
            content = change(self._checked())
            write_sealed(self.path, self.kind, content)
        return content

    def keep(self, change: Callable[[_Content | None], _Content]) -> None:
        """Does as `update`; if that fails it costs only time, and one line says so."""
        try:
            self.update(change)
        except OSError as error:
            tell_unkept(self.path, error)

    def _checked(self) -> _Content | None:
        """Reads under the lock: nobody else replaces a damaged file before it is removed."""
        found = self._tried()
        if isinstance(found, DamagedError):
            self._tell(found)
            with suppress(OSError):  # or every reader would say so again
                self.path.unlink()
            return None
        return found

    def _tried(self) -> _Content | DamagedError | None:
        try:
            return read_sealed(self.path, self.kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedError as error:
            return error
        except OSError as error:
            self._tell(error)
            return None

    def _tell(self, error: Exception) -> None:
        _log.warning("%s is damaged or of another version, made again: %s", self.path, error)


def tell_unkept(path: Path, error: Exception) -> None:
    """Logs that `path` cannot be saved; of all files in the cache, once for each reason."""
    root = cache_directory()
    number = getattr(error, "errno", None)
    reason = str(error) if number is None else os.strerror(number)
    _tell_once(root if root in path.parents else path, reason)


@cache
def _tell_once(where: Path, reason: str) -> None:
    _log.warning("what is learnt cannot be saved in %s: %s", where, reason)


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
