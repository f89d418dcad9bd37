"""JSON files sealed with a checksum, versioned by the type of their content and replaced whole.

The first line of a sealed file is `{"sha256": "DIGEST",`; the digest is that of an opening brace
and all lines after the first. The whole is a JSON object.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from edge_spec.errors import ModelFileError
from edge_spec.storage.atomic import atomic_file, cache_directory

MAX_FILE_BYTES = 4_000_000
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


def tell_unkept(path: Path, error: Exception) -> None:
    """Logs that `path` cannot be saved; of all files in the cache, once for each reason."""
    root = cache_directory()
    number = getattr(error, "errno", None)
    reason = str(error) if number is None else os.strerror(number)
    _tell_once(root if root in path.parents else path, reason)


@cache
def _tell_once(where: Path, reason: str) -> None:
    _log.warning("what is learnt cannot be saved in %s: %s", where, reason)
