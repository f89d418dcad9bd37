"""Tokenizers that were made of a model file's metadata, kept in the cache: to make one of 262,144
tokens takes seconds.

The first line of such a file is the SHA-256 of the file's own name, without the ending, and of all
that follows: a tokenizer.json. The name is the digest of what the tokenizer is made of
(`DigestedTokenizer`), so that a file of another model, version or library is never looked at.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from edge_spec.core.model_info import DigestedTokenizer, ModelInfo
from edge_spec.errors import ModelFileError
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.json_store import tell_unkept

MAX_TOKENIZER_BYTES = 100_000_000  # several times what any has
SUFFIX = ".tokenizer"
_DIGEST_BYTES = 64

_log = logging.getLogger(__name__)


def kept_tokenizer_json(published: ModelInfo) -> str:
    """`published.tokenizer_json()`, from the cache where it is there, else kept there from now on.

    Raises as that does; a cache that cannot be written costs only time.
    """
    digest = published.tokenizer_digest if isinstance(published, DigestedTokenizer) else None
    if digest is None:
        return published.tokenizer_json()
    path = cache_directory() / "tokenizers" / f"{digest}{SUFFIX}"
    try:
        return read_kept_tokenizer(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (ModelFileError, OSError) as error:
        _log.warning("%s", error)
    json = published.tokenizer_json()
    _keep(path, json.encode())
    return json


def read_kept_tokenizer(path: Path) -> str:
    """Returns the tokenizer.json. Raises ModelFileError for a damaged file, OSError."""
    with path.open("rb") as file:
        seal = file.readline(_DIGEST_BYTES + 1)
        body = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(body) > MAX_TOKENIZER_BYTES or seal != _seal(path, body):
        raise ModelFileError(
            f"{path} is damaged, the tokenizer is made again",
            remedy="Check the disk it is on if that happens again.",
        )
    return body.decode()


def _keep(path: Path, body: bytes) -> None:
    if len(body) > MAX_TOKENIZER_BYTES:
        return
    try:
        with atomic_file(path) as work, work.open("wb") as file:
            file.write(_seal(path, body))
            file.write(body)
    except OSError as error:
        tell_unkept(path, error)


def _seal(path: Path, body: bytes) -> bytes:
    digest = hashlib.sha256(path.stem.encode() + b"\n")
    digest.update(body)
    return digest.hexdigest().encode() + b"\n"
