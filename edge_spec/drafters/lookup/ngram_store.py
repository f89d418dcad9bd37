"""Counts of what followed each context of one to three tokens, kept in one file a model.

The file is a magic, the sha256 of all after it, _FIELDS, and four columns with one entry a record,
little-endian: contexts int64, tokens int32, counts uint32, last_used uint32. Records are ordered
by context, within it by falling count and then by token. The file is loaded, not memory-mapped:
its checksum reads all of it anyway, and Windows cannot replace a file that is mapped elsewhere.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_spec.errors import ModelFileError, UsageError
from edge_spec.storage.atomic import atomic_file
from edge_spec.storage.json_store import tell_unkept
from edge_spec.storage.locks import locked

MAX_ORDER = 3  # tokens of the longest context
MAX_RECORDS = 500_000  # 10 MB
LOCK_TIMEOUT_S = 1.0  # a save holds the lock for some tenths of a second at most

_PRIVATE = 0o600  # it tells what was written

_log = logging.getLogger(__name__)

_TOKEN_BITS = 21  # three tokens in 63 bits: contexts are their own keys and cannot collide
_ABSENT = (1 << _TOKEN_BITS) - 1
_NO_CONTEXT = (1 << _TOKEN_BITS * MAX_ORDER) - 1  # _ABSENT three times
_MAX_COUNT = (1 << 32) - 1
_MAGIC, _VERSION = b"ESNGRAM\n", 1
_SEAL_BYTES = len(_MAGIC) + hashlib.sha256().digest_size  # the sha256 is that of all after it
_FIELDS = struct.Struct("<IIQ32s")  # version, clock, records, sha256 of the vocabulary
_DTYPES, _RECORD_BYTES = ("<i8", "<i4", "<u4", "<u4"), 20


class Followers(NamedTuple):
    """What has followed a context."""

    total: int  # how often anything did
    best: list[tuple[int, int]]  # (token, count) of the most frequent, best first


class Records(NamedTuple):
    """Columns of equal length in the order of the file."""

    contexts: np.ndarray  # [records] int64, from `pack`
    tokens: np.ndarray  # [records] int32
    counts: np.ndarray  # [records] uint32
    last_used: np.ndarray  # [records] uint32: the clock of the save that last added to the count

    def rows(self, chosen: np.ndarray) -> Records:
        return Records(*(column[chosen] for column in self))


class _Contents(NamedTuple):
    """What the file held when it was last read or written."""

    seal: bytes  # magic and checksum; empty where there was no file of use
    clock: int  # saves so far
    records: Records


_NOTHING = _Contents(b"", 0, Records(*(np.empty(0, dtype) for dtype in _DTYPES)))


class _UnusableError(Exception):
    """A file that holds no counts for this model; the text completes "the file ..."."""


def pack(context: Sequence[int]) -> int:
    """One to three tokens, the last one last, as a key of 63 bits that no other context has."""
    packed = _NO_CONTEXT
    for token in context:
        packed = (packed << _TOKEN_BITS | token) & _NO_CONTEXT
    return packed


class NgramStore:
    """The counts of a file and those of this session, which `save` adds to the file.

    A record is used when its token is written after its context; a draft token in vain keeps none
    alive. A file that is damaged or belongs to another vocabulary is logged once and begun again.
    Several processes may share a file. Use a store from one thread at a time.

    vocabulary: identifies the meaning of token ids. Raises UsageError if they can be too large.
    """

    def __init__(
        self, path: Path, vocabulary: str, vocab_size: int, max_records: int = MAX_RECORDS
    ) -> None:
        if vocab_size >= _ABSENT:
            raise UsageError(
                f"a vocabulary of {vocab_size} tokens is too large for the n-gram cache",
                remedy=f"It has to be below {_ABSENT}: choose another --drafter.",
            )
        self._path = path
        self._vocabulary = hashlib.sha256(f"{vocab_size} {vocabulary}".encode()).digest()
        self._vocab_size = vocab_size
        self._max_records = max_records
        self._warned: set[str] = set()
        self._added: dict[int, dict[int, tuple[int, int]]] = {}  # to each: saved count, added
        self.num_unsaved = 0  # records that this session has added to
        self._saved = _NOTHING
        try:
            self._saved = self._read()
        except OSError as error:
            self._warn(f"cannot be read ({error.strerror}); its counts are not used")

    def add(self, context: Sequence[int], token: int, count: int = 1) -> None:
        """Counts `token` after `context`. Where nothing can be saved, memory stays bounded:
        `max_records` records are added to, further ones are not counted."""
        key = pack(context)
        followers = self._added.get(key, {})
        if token in followers:
            saved, added = followers[token]
            followers[token] = saved, added + count
        elif self.num_unsaved < self._max_records:
            records, rows = self._saved.records, slice(*self._range(key))
            saved = int(records.counts[rows][records.tokens[rows] == token].sum())
            followers[token] = saved, count
            self._added[key] = followers
            self.num_unsaved += 1

    def lookup(self, context: Sequence[int], limit: int) -> Followers:
        """The `limit` most frequent followers; of equal ones, those with the lower token."""
        key = pack(context)
        first, end = self._range(key)
        added = self._added.get(key, {})
        best = slice(first, min(end, first + limit))
        records = self._saved.records
        counts = records.counts[best].tolist()
        ordered = list(zip(records.tokens[best].tolist(), counts, strict=True))
        total = sum(counts)
        if len(counts) < end - first:
            total = int(records.counts[first:end].sum(dtype=np.uint64))
        if added:
            # The best of the file only rise: whoever stays below all of them is not among the best.
            least = counts[-1] if len(counts) == limit else 0
            merged = dict(ordered)
            for token, (saved, count) in added.items():
                total += count
                if saved + count >= least:
                    merged[token] = saved + count
            ordered = sorted(merged.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]
        return Followers(total, ordered)

    def save(self) -> bool:
        """Adds this session's counts to the file; False if they stay for the next time.

        Counts saturate. Beyond `max_records`, the least recently used records go, of these the
        least frequent. Raises nothing: why it failed is logged once.
        """
        if not self._added:
            return True
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._path, LOCK_TIMEOUT_S):
                self._write(self._read())
        except TimeoutError:
            self._warn("is being saved by another process; the new counts wait")
        except OSError as error:
            tell_unkept(self._path, error)  # the new counts stay in memory
        else:
            self._warned.clear()
            return True
        return False

    def _range(self, key: int) -> tuple[int, int]:
        """Rows of a context: first, end."""
        first, end = self._saved.records.contexts.searchsorted((key, key + 1)).tolist()
        return first, end

    def _read(self) -> _Contents:
        """What the file holds now. Raises OSError where it cannot be read."""
        try:
            with self._path.open("rb") as file:
                seal = file.read(_SEAL_BYTES)
                if seal and seal == self._saved.seal:
                    return self._saved
                return _parsed(seal, file.read(), self._vocabulary, self._vocab_size)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except _UnusableError as error:
            self._warn(f"{error}; it starts again")
        return _NOTHING

    def _write(self, old: _Contents) -> None:
        """Writes the file again, with this session's counts, and goes on from there."""
        clock = min(old.clock + 1, _MAX_COUNT)
        records = _bounded(_merged(old.records, self._added_records(clock)), self._max_records)
        fields = _FIELDS.pack(_VERSION, clock, len(records.contexts), self._vocabulary)
        content = b"".join((fields, *(column.tobytes() for column in records)))
        seal = _MAGIC + hashlib.sha256(content).digest()
        try:
            with atomic_file(self._path, _PRIVATE) as work, work.open("wb") as file:
                file.write(seal)
                file.write(content)
        except OSError:
            # Where only the sync of the directory failed, adding again would count twice.
            if self._read().seal != seal:
                raise
        self._saved = _Contents(seal, clock, records)
        self._added.clear()
        self.num_unsaved = 0

    def _added_records(self, clock: int) -> Records:
        """This session's counts, in no order."""
        rows = [
            (key, token, min(count, _MAX_COUNT), clock)
            for key, followers in self._added.items()
            for token, (_, count) in followers.items()
        ]
        return Records(*map(np.array, zip(*rows, strict=True), _DTYPES))

    def _warn(self, what: str) -> None:
        """Logs that the file `what`: once, until a save succeeds."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("n-gram cache %s %s", self._path, what)


def check_store(path: Path) -> None:
    """That a file is whole, whatever its vocabulary. Raises ModelFileError, OSError."""
    with path.open("rb") as file:
        seal, content = file.read(_SEAL_BYTES), file.read()
    try:
        _sealed(seal, content)
    except _UnusableError as error:
        raise ModelFileError(f"{path} {error}", remedy="Delete it: it starts again.") from None


def _sealed(seal: bytes, content: bytes) -> tuple[int, int, bytes]:
    """Clock, number of records and vocabulary. Raises _UnusableError if it is not as written."""
    if not seal.startswith(_MAGIC):
        raise _UnusableError("is not an n-gram cache")
    if len(content) < _FIELDS.size:
        raise _UnusableError("is truncated or corrupt")
    version, clock, num_records, found_vocabulary = _FIELDS.unpack_from(content)
    if version != _VERSION:
        raise _UnusableError(f"has version {version}, not {_VERSION}")
    whole = len(content) == _FIELDS.size + num_records * _RECORD_BYTES
    if not whole or hashlib.sha256(content).digest() != seal[len(_MAGIC) :]:
        raise _UnusableError("is truncated or corrupt")
    return clock, num_records, found_vocabulary


def _parsed(seal: bytes, content: bytes, vocabulary: bytes, vocab_size: int) -> _Contents:
    """Raises _UnusableError if the file is not what was written for this vocabulary."""
    clock, num_records, found_vocabulary = _sealed(seal, content)
    if found_vocabulary != vocabulary:
        raise _UnusableError("belongs to another vocabulary")
    columns, at = [], _FIELDS.size
    for dtype in _DTYPES:
        columns.append(np.frombuffer(content, dtype, num_records, at))
        at += columns[-1].nbytes
    records = Records(*columns)
    # A runtime that is given such a token may crash.
    if num_records and not 0 <= records.tokens.min() <= records.tokens.max() < vocab_size:
        raise _UnusableError("holds tokens outside the vocabulary")
    return _Contents(seal, clock, records)


def _merged(saved: Records, added: Records) -> Records:
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
        np.minimum(counts, _MAX_COUNT).astype(np.uint32),
        np.maximum.reduceat(records.last_used, starts),
    )
    falling = _MAX_COUNT - summed.counts
    return summed.rows(np.lexsort((falling, summed.contexts)))  # stable: tokens stay ascending


def _bounded(records: Records, max_records: int) -> Records:
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
