"""The file of a conversation, or of a kept state of the target's cache: a JSON header, then arrays.

    16 bytes  "edge-spec chat" and two zeros
     8        version
     8        bytes of the header
    32        sha256 of everything else
              header, UTF-8
              each array listed in the header, little-endian

Numbers are little-endian. Nothing in a file is executed. A reader allocates at most the file's size
and returns nothing before checking everything (but `read_text`, which reads the beginning only).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from edge_spec.core.model import STATE_TYPES, StateType
from edge_spec.errors import SnapshotError
from edge_spec.storage.atomic import atomic_file

VERSION = 1  # raise it when a snapshot's meaning changes
MAX_HEADER_BYTES = 16_000_000
MAX_PLAIN_ROUNDS = 256
_MAGIC = b"edge-spec chat\0\0"
_START = struct.Struct("<16sQQ32s")
_PRIVATE = 0o600  # it is a private conversation

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Description(BaseModel):
    """What a snapshot was taken of; the text itself is an array."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model: str  # name, for messages
    fingerprint: str  # changes with the model
    computing: str  # changes with whatever may change a bit of the cache
    drafts: tuple[str, ...]  # likewise, of each draft model
    exact: bool  # written in exact mode
    noise: _NotNegative  # margin below which the cache may change plain decoding's choice
    # of plain rounds
    plain_s: Annotated[tuple[_NotNegative, ...], Field(max_length=MAX_PLAIN_ROUNDS)]
    learnt: dict[str, list[_Finite]]  # by drafter, over all texts
    note: dict[str, JsonValue] | None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One conversation."""

    description: Description
    tokens: np.ndarray  # [length] int32, in the target's cache
    cache: Mapping[str, np.ndarray]  # of the target; empty if its session cannot export it
    drafters: Mapping[str, np.ndarray]  # drafters' state of the conversation


class _Array(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str
    type: StateType
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], Field(max_length=8)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.type).itemsize


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    description: Description
    arrays: tuple[_Array, ...]


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write atomically, readable by the owner only. Raises SnapshotError if it cannot be written,
    ValueError for an array type not in STATE_TYPES."""
    arrays = _named(snapshot)
    listed = []
    for name, array in arrays.items():
        kind = array.dtype.newbyteorder("<").str
        if kind not in STATE_TYPES:
            raise ValueError(f"{name} is an array of {array.dtype}")
        listed.append({"name": name, "type": kind, "shape": array.shape})
    described = {"description": snapshot.description.model_dump(), "arrays": listed}
    header = json.dumps(described).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"the note of this snapshot makes its header {len(header):,} bytes long",
            remedy=f"There is room for {MAX_HEADER_BYTES:,}.",
        )
    parts: list[bytes | memoryview] = [header, *map(_bytes_of, arrays.values())]
    digest = _digest(VERSION, len(header))
    for part in parts:
        digest.update(part)
    try:
        with atomic_file(path, _PRIVATE) as work, work.open("wb") as file:
            file.write(_START.pack(_MAGIC, VERSION, len(header), digest.digest()))
            for part in parts:
                file.write(part)
    except OSError as error:
        raise SnapshotError(
            f"cannot write {path}: {error.strerror or error}", remedy="Choose another place."
        ) from error


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot. Raises SnapshotError if it is missing, damaged or another kind of file."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise SnapshotError(f"there is no file {path}", remedy="Check the path.")
        with path.open("rb") as file, _checked(path):
            return _read(path, file)
    except OSError as error:
        raise SnapshotError(
            f"cannot read {path}: {error.strerror or error}", remedy="Check the path."
        ) from error


def read_text(path: Path) -> tuple[Description, np.ndarray]:
    """Return the description and the text, [length] int32, reading and checking only the beginning.
    Raises SnapshotError for another kind of file, and OSError."""
    with path.open("rb") as file, _checked(path):
        header, _, _ = _read_header(path, file)
        listed = next(iter(header.arrays), None)
        if listed is None or (listed.name, listed.type) != ("tokens", "<i4"):
            raise ValueError("it does not begin with its text")
        tokens = np.frombuffer(file.read(listed.num_bytes), "<i4").astype(np.int32)
        return header.description, tokens


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Raise SnapshotError for damage found in the block."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise SnapshotError(
            f"{path} is damaged: {_reason(error)}", remedy="Restore another snapshot."
        ) from None


def _require_magic(path: Path, start: bytes) -> None:
    if len(start) < _START.size or not start.startswith(_MAGIC):
        raise SnapshotError(
            f"{path} is no snapshot of a conversation", remedy="Give a file that was saved as one."
        )


def _read_header(path: Path, file: BufferedReader) -> tuple[_Header, bytes, hashlib._Hash]:
    """Return the header, the file's checksum, and the hash so far. Raises ValueError or
    RecursionError for damage."""
    size = path.stat().st_size
    start = file.read(_START.size)
    _require_magic(path, start)
    _, version, header_bytes, expected = _START.unpack(start)
    if version != VERSION:
        raise SnapshotError(
            f"{path} is a snapshot of version {version}, this edge-spec reads version {VERSION}",
            remedy="Restore it with the edge-spec that wrote it.",
        )
    if header_bytes > min(MAX_HEADER_BYTES, size - _START.size):
        raise ValueError(f"a header of {header_bytes} bytes")
    encoded = file.read(header_bytes)
    digest = _digest(version, header_bytes)
    digest.update(encoded)
    header = _Header.model_validate(json.loads(encoded))
    needed = _START.size + header_bytes + sum(array.num_bytes for array in header.arrays)
    if needed != size:
        raise ValueError(f"it has {size} bytes, its header tells of {needed}")
    return header, expected, digest


def _read(path: Path, file: BufferedReader) -> Snapshot:
    header, expected, digest = _read_header(path, file)
    arrays = {}
    for listed in header.arrays:
        content = bytearray(listed.num_bytes)
        if file.readinto(content) != len(content):
            raise ValueError(f"it ends within {listed.name}")
        digest.update(content)
        arrays[listed.name] = np.frombuffer(content, listed.type).reshape(listed.shape)
    if digest.digest() != expected:
        raise ValueError("its checksum is wrong")
    if len(arrays) < len(header.arrays):
        raise ValueError("two arrays have one name")
    return _snapshot(header.description, arrays)


def _snapshot(description: Description, arrays: Mapping[str, np.ndarray]) -> Snapshot:
    groups: dict[str, dict[str, np.ndarray]] = {"tokens": {}, "cache": {}, "drafters": {}}
    for name, array in arrays.items():
        group, _, own = name.partition("/")
        if group not in groups:
            raise ValueError(f"an array {name} that no snapshot has")
        groups[group][own] = array
    tokens = groups["tokens"].get("", np.empty(0))
    if tokens.ndim != 1 or tokens.dtype != np.int32:
        raise ValueError("it has no text")
    return Snapshot(description, tokens, groups["cache"], groups["drafters"])


def _named(snapshot: Snapshot) -> dict[str, np.ndarray]:
    cache = {f"cache/{name}": array for name, array in snapshot.cache.items()}
    drafters = {f"drafters/{name}": array for name, array in snapshot.drafters.items()}
    return {"tokens": snapshot.tokens, **cache, **drafters}


def _bytes_of(array: np.ndarray) -> memoryview:
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data


def _digest(version: int, header_bytes: int) -> hashlib._Hash:
    return hashlib.sha256(_START.pack(_MAGIC, version, header_bytes, b""))


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
