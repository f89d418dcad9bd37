"""Keeps on disk what the target's cache holds after the beginning of a long prompt, so that a
prompt that begins like it is read from there on.

A prompt is read in passes of PREFILL_TOKENS from its beginning, and a state is kept only where one
of these passes ended, with nothing but such passes before it. Who takes it up goes on with the very
passes that reading the whole prompt would have had: the logits are the same bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from edge_spec.core.model import Restorable, Session
from edge_spec.core.session_errors import TranslatedErrors, translate_errors
from edge_spec.engine.snapshot_file import Description, Snapshot, read_snapshot, write_snapshot
from edge_spec.errors import SnapshotError
from edge_spec.storage.json_store import tell_unkept

PREFILL_TOKENS = 256  # of a pass; between two looks at whether the generation was cancelled
SUFFIX = ".prompt"
MAX_BYTES = 4_000_000_000  # of all prompts in a directory
TAIL_TOKENS = 64  # at the end of a prompt, which another one with the same beginning may not share
_MAX_SEEN = 10_000  # beginnings that are remembered
_MAX_WAITING_BYTES = 500_000_000  # of the states that wait for the disk

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Taken:
    path: Path
    tokens: np.ndarray  # [length] int32
    state: Mapping[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.state.values())


class PromptCache:
    """The kept prompts of one model, as one engine and its forks compute them. Any thread may call.

    key: changes with whatever may change a bit of a state. max_bytes: of all prompts in the
    directory, of other models too; those that were used last stay.
    """

    def __init__(self, directory: Path, key: str, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory
        self._key = key
        self._max_bytes = max_bytes
        self._seen: dict[Path, None] = {}  # beginnings of the prompts of this process
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, "prompt-cache")
        self._writing: Future[None] | None = None  # the last of them
        self._waiting_bytes = 0

    def begin(self, prompt: Sequence[int]) -> PromptReading:
        """Returns the reading of a prompt, which is about to begin."""
        return PromptReading(self, prompt)

    def paths(self, prompt: Sequence[int]) -> dict[int, Path]:
        """Returns, by length, where the states after its whole passes are kept, or would be."""
        tokens = np.array(prompt, "<i4")
        digest = hashlib.sha256(self._key.encode())
        found = {}
        for length in range(PREFILL_TOKENS, len(prompt), PREFILL_TOKENS):
            digest.update(tokens[length - PREFILL_TOKENS : length].tobytes())
            found[length] = self._directory / f"{digest.hexdigest()}{SUFFIX}"
        return found

    def shared(self, paths: Mapping[int, Path]) -> int:
        """Returns the longest of these beginnings that an earlier prompt of this process had; 0 for
        none. All of them are seen from now on."""
        with self._lock:
            longest = max(
                (length for length, path in paths.items() if path in self._seen), default=0
            )
            self._seen.update(dict.fromkeys(paths.values()))
            for path in list(self._seen)[:-_MAX_SEEN]:
                del self._seen[path]
        return longest

    def read(self, path: Path, tokens: Sequence[int]) -> Mapping[str, np.ndarray] | None:
        """Returns the state after these tokens; None where it is not kept. A damaged file is
        removed, which one line says."""
        if not path.is_file():
            return None
        try:
            snapshot = read_snapshot(path)
            if snapshot.description.fingerprint != self._key or snapshot.tokens.tolist() != tokens:
                raise SnapshotError(f"{path} is of another prompt", remedy="It is read again.")
        except SnapshotError as error:
            self.forget(path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used one goes first
        return snapshot.cache

    def forget(self, path: Path, why: Exception) -> None:
        _log.warning("a kept prompt cannot be used and is read again: %s", why)
        with suppress(OSError):
            path.unlink()

    def write(self, taken: Sequence[_Taken]) -> None:
        """Writes states in another thread, one after the other. Where the disk is so slow that too
        many bytes would wait for it, these are not kept."""
        size = sum(each.num_bytes for each in taken)
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size > _MAX_WAITING_BYTES:
                return
            self._waiting_bytes += size
            self._writing = self._writer.submit(self._write_waiting, taken, size)

    def flush(self) -> None:
        """Returns when everything is written."""
        with self._lock:
            writing = self._writing
        error = None if writing is None else writing.exception()
        if isinstance(error, Exception):
            tell_unkept(self._directory, error)

    def _write_waiting(self, taken: Sequence[_Taken], size: int) -> None:
        try:
            self._write(taken)
        finally:
            with self._lock:
                self._waiting_bytes -= size

    def _write(self, taken: Sequence[_Taken]) -> None:
        for each in taken:
            if each.num_bytes > self._max_bytes or each.path.is_file():
                continue
            description = Description(
                model="",
                fingerprint=self._key,
                computing="",
                drafts=(),
                exact=False,
                noise=0.0,
                plain_s=(),
                learnt={},
                note=None,
            )
            try:
                write_snapshot(each.path, Snapshot(description, each.tokens, each.state, {}))
            except SnapshotError as error:
                tell_unkept(each.path, error)
                return
        self._evict()

    def _evict(self) -> None:
        """Removes those that were not used for longest, until the others fit."""
        found = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process has removed it
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left <= self._max_bytes:
                return
            with suppress(OSError):
                path.unlink()
                left -= size


class PromptReading:
    """One prompt while it is read: what of it is kept already, and what of it will be."""

    def __init__(self, cache: PromptCache, prompt: Sequence[int]) -> None:
        self._cache = cache
        self._prompt = list(prompt)
        self._paths = cache.paths(prompt)
        self._shared = cache.shared(self._paths)
        self._wanted: set[int] = set()
        self._taken: list[_Taken] = []

    def recall(self, target: Session) -> int:
        """Gives the target the longest kept beginning, where that is longer than what it holds;
        returns its length, else 0. Raises SessionError."""
        if not isinstance(target, Restorable):
            return 0
        recalled = self._recall(target, target.length)
        last = (len(self._prompt) - 1 - TAIL_TOKENS) // PREFILL_TOKENS * PREFILL_TOKENS
        lengths = {self._shared, last} & self._paths.keys()
        self._wanted = {length for length in lengths if not self._paths[length].is_file()}
        return recalled

    def _recall(self, target: Restorable, held: int) -> int:
        for length, path in sorted(self._paths.items(), reverse=True):
            if length <= held:
                break
            state = self._cache.read(path, self._prompt[:length])
            if state is None:
                continue
            try:
                with TranslatedErrors(ValueError):
                    target.restore(state, length)
            except ValueError as error:
                self._cache.forget(path, error)
                continue
            return length
        return 0

    def place_to_take(self, length: int, num_whole: int) -> int:
        """Returns how many of the `length` tokens that the target holds it should keep, so that
        what is shared with an earlier prompt can be taken. At most one pass is then read again."""
        shared = self._shared
        if shared in self._wanted and shared <= num_whole and length - shared < PREFILL_TOKENS:
            return shared
        return length

    def take(self, target: Session, num_whole: int) -> None:
        """Keeps the target's state where it is wanted, between passes. num_whole: tokens at the
        beginning that whole passes have written."""
        length = target.length
        if length != num_whole or length not in self._wanted or not isinstance(target, Restorable):
            return
        self._wanted.discard(length)
        with translate_errors:
            state = target.state()
        if state:
            tokens = np.array(self._prompt[:length], np.int32)
            self._taken.append(_Taken(self._paths[length], tokens, state))

    def finish(self) -> None:
        """Writes what was taken, after the answer."""
        if self._taken:
            self._cache.write(self._taken)
            self._taken = []
