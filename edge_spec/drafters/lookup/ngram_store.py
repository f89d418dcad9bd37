"""Counts of what followed each context of one to three tokens, kept in one file a model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_spec.drafters.lookup.ngram_file import (
    ABSENT,
    DTYPES,
    MAX_COUNT,
    NOTHING,
    SEAL_BYTES,
    Contents,
    Records,
    UnusableError,
    bounded,
    merged,
    pack,
    parsed,
    serialized,
)
from edge_spec.errors import UsageError
from edge_spec.storage.atomic import atomic_file
from edge_spec.storage.json_store import tell_unkept
from edge_spec.storage.locks import locked

MAX_RECORDS = 500_000  # 10 MB
LOCK_TIMEOUT_S = 1.0  # a save holds the lock for some tenths of a second at most

_PRIVATE = 0o600  # it tells what was written

_log = logging.getLogger(__name__)


class Followers(NamedTuple):
    """What has followed a context."""

    total: int  # how often anything did
    best: list[tuple[int, int]]  # (token, count) of the most frequent, best first


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
        if vocab_size >= ABSENT:
            raise UsageError(
                f"a vocabulary of {vocab_size} tokens is too large for the n-gram cache",
                remedy=f"It has to be below {ABSENT}: choose another --drafter.",
            )
        self._path = path
        self._vocabulary = hashlib.sha256(f"{vocab_size} {vocabulary}".encode()).digest()
        self._vocab_size = vocab_size
        self._max_records = max_records
        self._warned: set[str] = set()
        self._added: dict[int, dict[int, tuple[int, int]]] = {}  # to each: saved count, added
        self.num_unsaved = 0  # records that this session has added to
        self._saved = NOTHING
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

    def _read(self) -> Contents:
        """What the file holds now. Raises OSError where it cannot be read."""
        try:
            with self._path.open("rb") as file:
                seal = file.read(SEAL_BYTES)
                if seal and seal == self._saved.seal:
                    return self._saved
                return parsed(seal, file.read(), self._vocabulary, self._vocab_size)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except UnusableError as error:
            self._warn(f"{error}; it starts again")
        return NOTHING

    def _write(self, old: Contents) -> None:
        """Writes the file again, with this session's counts, and goes on from there."""
        clock = min(old.clock + 1, MAX_COUNT)
        records = bounded(merged(old.records, self._added_records(clock)), self._max_records)
        seal, content = serialized(clock, records, self._vocabulary)
        try:
            with atomic_file(self._path, _PRIVATE) as work, work.open("wb") as file:
                file.write(seal)
                file.write(content)
        except OSError:
            # Where only the sync of the directory failed, adding again would count twice.
            if self._read().seal != seal:
                raise
        self._saved = Contents(seal, clock, records)
        self._added.clear()
        self.num_unsaved = 0

    def _added_records(self, clock: int) -> Records:
        """This session's counts, in no order."""
        rows = [
            (key, token, min(count, MAX_COUNT), clock)
            for key, followers in self._added.items()
            for token, (_, count) in followers.items()
        ]
        return Records(*map(np.array, zip(*rows, strict=True), DTYPES))

    def _warn(self, what: str) -> None:
        """Logs that the file `what`: once, until a save succeeds."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("n-gram cache %s %s", self._path, what)
