"""The file that keeps n-gram counts: its layout, and how the counts of two become one's.

It is a magic, the sha256 of all after it, _FIELDS, and four columns with one entry a record,
little-endian: contexts int64, tokens int32, counts uint32, last_used uint32. Records are ordered
by context, within it by falling count and then by token. The file is loaded, not memory-mapped:
its checksum reads all of it anyway, and Windows cannot replace a file that is mapped elsewhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_spec.errors import ModelFileError

MAX_ORDER = 3  # tokens of the longest context
_TOKEN_BITS = 21  # three tokens in 63 bits: contexts are their own keys and cannot collide
ABSENT = (1 << _TOKEN_BITS) - 1
_NO_CONTEXT = (1 << _TOKEN_BITS * MAX_ORDER) - 1  # ABSENT three times
MAX_COUNT = (1 << 32) - 1
_MAGIC, _VERSION = b"ESNGRAM\n", 1
SEAL_BYTES = len(_MAGIC) + hashlib.sha256().digest_size  # the sha256 is that of all after it
_FIELDS = struct.Struct("<IIQ32s")  # version, clock, records, sha256 of the vocabulary
DTYPES, _RECORD_BYTES = ("<i8", "<i4", "<u4", "<u4"), 20


class Records(NamedTuple):
    """Columns of equal length in the order of the file."""

    contexts: np.ndarray  # [records] int64, from `pack`
    tokens: np.ndarray  # [records] int32
    counts: np.ndarray  # [records] uint32
    last_used: np.ndarray  # [records] uint32: the clock of the save that last added to the count

    def rows(self, chosen: np.ndarray) -> Records:
        return Records(*(column[chosen] for column in self))


class Contents(NamedTuple):
    """What the file held when it was last read or written."""

    seal: bytes  # magic and checksum; empty where there was no file of use
    clock: int  # saves so far
    records: Records


NOTHING = Contents(b"", 0, Records(*(np.empty(0, dtype) for dtype in DTYPES)))


class UnusableError(Exception):
    """A file that holds no counts for this model; the text completes "the file ..."."""


def pack(context: Sequence[int]) -> int:
    """One to three tokens, the last one last, as a key of 63 bits that no other context has."""
    packed = _NO_CONTEXT
    for token in context:
        packed = (packed << _TOKEN_BITS | token) & _NO_CONTEXT
    return packed


def serialized(clock: int, records: Records, vocabulary: bytes) -> tuple[bytes, bytes]:
    """Returns the seal, and all that stands after it."""
    fields = _FIELDS.pack(_VERSION, clock, len(records.contexts), vocabulary)
    content = b"".join((fields, *(column.tobytes() for column in records)))
    return _MAGIC + hashlib.sha256(content).digest(), content


def check_store(path: Path) -> None:
    """That a file is whole, whatever its vocabulary. Raises ModelFileError, OSError."""
    with path.open("rb") as file:
        seal, content = file.read(SEAL_BYTES), file.read()
    try:
        _sealed(seal, content)
    except UnusableError as error:
        raise ModelFileError(f"{path} {error}", remedy="Delete it: it starts again.") from None


def _sealed(seal: bytes, content: bytes) -> tuple[int, int, bytes]:
    """Clock, number of records and vocabulary. Raises UnusableError if it is not as written."""
    if not seal.startswith(_MAGIC):
        raise UnusableError("is not an n-gram cache")
    if len(content) < _FIELDS.size:
        raise UnusableError("is truncated or corrupt")
    version, clock, num_records, found_vocabulary = _FIELDS.unpack_from(content)
    if version != _VERSION:
        raise UnusableError(f"has version {version}, not {_VERSION}")
    whole = len(content) == _FIELDS.size + num_records * _RECORD_BYTES
    if not whole or hashlib.sha256(content).digest() != seal[len(_MAGIC) :]:
        raise UnusableError("is truncated or corrupt")
    return clock, num_records, found_vocabulary


def parsed(seal: bytes, content: bytes, vocabulary: bytes, vocab_size: int) -> Contents:
    """Raises UnusableError if the file is not what was written for this vocabulary."""
    clock, num_records, found_vocabulary = _sealed(seal, content)
    if found_vocabulary != vocabulary:
        raise UnusableError("belongs to another vocabulary")
    columns, at = [], _FIELDS.size
    for dtype in DTYPES:
        columns.append(np.frombuffer(content, dtype, num_records, at))
        at += columns[-1].nbytes
    records = Records(*columns)
    # A runtime that is given such a token may crash.
    if num_records and not 0 <= records.tokens.min() <= records.tokens.max() < vocab_size:
        raise UnusableError("holds tokens outside the vocabulary")
    return Contents(seal, clock, records)


def merged(saved: Records, added: Records) -> Records:
    """Both in one, counts summed. Sorts only the contexts that were added to, not the file."""
    contexts = np.unique(added.contexts)
    first, end = (saved.contexts.searchsorted(contexts, side) for side in ("left", "right"))
    edges = np.zeros(len(saved.contexts) + 1, np.int8)
    known = first < end
    edges[first[known]] += 1
    edges[end[known]] -= 1  # contexts do not overlap: no row is twice a first or twice an end
    touched = np.cumsum(edges[:-1], dtype=np.int8).astype(bool)
    changed = _summed(Records(*map(np.concatenate, zip(saved.rows(touched), added, strict=True))))
    untouched = saved.rows(~touched)
    places = untouched.contexts.searchsorted(changed.contexts)
    pairs = zip(untouched, changed, strict=True)
    return Records(*(np.insert(old, places, new) for old, new in pairs))


def _summed(records: Records) -> Records:
    """Records with the same context and token made one; in the order of the file."""
    records = records.rows(np.lexsort((records.tokens, records.contexts)))
    differs = (np.diff(records.contexts) != 0) | (np.diff(records.tokens) != 0)
    starts = np.flatnonzero(np.concatenate(([True], differs)))
    counts = np.add.reduceat(records.counts.astype(np.uint64), starts)
    summed = Records(
        records.contexts[starts],
        records.tokens[starts],
        np.minimum(counts, MAX_COUNT).astype(np.uint32),
        np.maximum.reduceat(records.last_used, starts),
    )
    falling = MAX_COUNT - summed.counts
    return summed.rows(np.lexsort((falling, summed.contexts)))  # stable: tokens stay ascending


def bounded(records: Records, max_records: int) -> Records:
    """Without the least recently used, of these the least frequent, of these the first."""
    excess = len(records.contexts) - max_records
    if excess <= 0:
        return records
    rank = records.last_used.astype(np.uint64) << np.uint64(32) | records.counts
    threshold = np.partition(rank, excess - 1)[excess - 1]
    dropped = rank < threshold
    tied = np.flatnonzero(rank == threshold)
    dropped[tied[: excess - int(dropped.sum())]] = True
    return records.rows(~dropped)
