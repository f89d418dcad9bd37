"""JSON that edge-spec keeps for itself: sealed with a checksum, versioned by its content's type,
replaced whole, one process at a time.

The first line of a sealed file is `{"sha256": "DIGEST",`; the digest is that of an opening brace
and all lines after the first. The whole is a JSON object.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from edge_spec.errors import ModelFileError
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.locks import locked

MAX_FILE_BYTES = 4_000_000
LOCK_S = 10.0  # after which another process is taken to hang
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')

_log = logging.getLogger(__name__)
_Content = TypeVar("_Content")


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
