"""Keeps on disk what the target's cache holds after the beginnings of long prompts."""

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

from edge_spec.engine.snapshot_file import Description, Snapshot, read_snapshot, write_snapshot
from edge_spec.errors import SnapshotError
from edge_spec.storage.json_store import tell_unkept

PREFILL_TOKENS = 256  # of a pass; between two looks at whether the generation was cancelled
SUFFIX, CONVERSATION_SUFFIX = ".prompt", ".conversation"
MAX_BYTES = 4_000_000_000  # of all prompts in a directory
_MAX_SEEN = 10_000  # beginnings that are remembered
_MAX_WAITING_BYTES = 500_000_000  # of the states that wait for the disk

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """The state of a target's cache after tokens, that whole passes have written where it is of a
    prompt.

    tokens: [length] int32. noise: as `Conversation` has it. note: a JSON object.
    """

    tokens: np.ndarray
    state: Mapping[str, np.ndarray]
    noise: float = 0.0
    note: Mapping[str, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the state."""
        return sum(array.nbytes for array in self.state.values())


class PromptFiles:
    """The kept prompts of one model, as one engine and its forks compute them. Any thread may call.

    key: changes with whatever may change a bit of a state. max_bytes: of all prompts in the
    directory, of other models too; those that were used last stay.
    """

    def __init__(self, directory: Path, key: str, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory
        self.key = key
        self._max_bytes = max_bytes
        self._seen: dict[Path, None] = {}  # beginnings of the prompts of this process
        self._again: dict[Path, int] = {}  # by the first pass of a text: `may_read_again`
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, "prompt-cache")
        self._writing: Future[None] | None = None  # the last of them
        self._waiting_bytes = 0

    def paths(self, prompt: Sequence[int]) -> dict[int, Path]:
        """Returns, by length, where the states after its whole passes are kept, or would be."""
        tokens = np.array(prompt, "<i4")
        digest = hashlib.sha256(self.key.encode())
        found = {}
        for length in range(PREFILL_TOKENS, len(prompt), PREFILL_TOKENS):
            digest.update(tokens[length - PREFILL_TOKENS : length].tobytes())
            found[length] = self.directory / f"{digest.hexdigest()}{SUFFIX}"
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

    def may_read_again(self, paths: Mapping[int, Path], length: int) -> bool:
        """Says whether less than a pass may be read again so that the beginning of this length can
        be kept: of a text that goes on and on, each time that it is twice as long."""
        with self._lock:
            first = paths[PREFILL_TOKENS]
            is_due = length >= 2 * self._again.get(first, 0)
            if is_due:
                self._again[first] = length
            for path in list(self._again)[:-_MAX_SEEN]:
                del self._again[path]
        return is_due

    def read(self, path: Path, tokens: Sequence[int] | None = None) -> Snapshot | None:
        """Returns what is kept, after these tokens where they are known; None where it is not. A
        damaged file is removed, which one line says."""
        if not path.is_file():
            return None
        try:
            snapshot = read_snapshot(path)
            is_other = tokens is not None and snapshot.tokens.tolist() != tokens
            if snapshot.description.fingerprint != self.key or is_other:
                raise SnapshotError(f"{path} is of another prompt", remedy="It is read again.")
        except SnapshotError as error:
            self.forget(path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used one goes first
        return snapshot

    def forget(self, path: Path, why: Exception) -> None:
        _log.warning("a kept prompt cannot be used and is read again: %s", why)
        with suppress(OSError):
            path.unlink()

    def write(self, taken: Mapping[Path, KeptPrompt]) -> bool:
        """Writes states in another thread, one after the other. Where the disk is so slow that too
        many bytes would wait for it, these are not kept, and it returns False."""
        size = sum(each.num_bytes for each in taken.values())
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size > _MAX_WAITING_BYTES:
                return False
            self._waiting_bytes += size
            self._writing = self._writer.submit(self._write_waiting, taken, size)
        return True

    def flush(self) -> None:
        """Returns when everything is written."""
        with self._lock:
            writing = self._writing
        error = None if writing is None else writing.exception()
        if isinstance(error, Exception):
            tell_unkept(self.directory, error)

    def _write_waiting(self, taken: Mapping[Path, KeptPrompt], size: int) -> None:
        try:
            self._write(taken)
        finally:
            with self._lock:
                self._waiting_bytes -= size

    def _write(self, taken: Mapping[Path, KeptPrompt]) -> None:
        for path, each in taken.items():
            if each.num_bytes > self._max_bytes or path.is_file():
                continue
            description = Description(
                model="",
                fingerprint=self.key,
                computing="",
                drafts=(),
                exact=False,
                noise=each.noise,
                plain_s=(),
                learnt={},
                note=None if each.note is None else dict(each.note),
            )
            try:
                write_snapshot(path, Snapshot(description, each.tokens, each.state, {}))
            except SnapshotError as error:
                tell_unkept(path, error)
                return
        self._evict()

    def _evict(self) -> None:
        """Removes those that were not used for longest, until the others fit."""
        found = []
        for path in self.directory.glob("*"):  # which may have files of others, too
            if path.suffix in (SUFFIX, CONVERSATION_SUFFIX):
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
