"""Keeps states of a target's KV cache, in memory for a model's conversations and on disk.

Prefixes of prompts are kept after whole passes of PREFILL_TOKENS. Reusing one leads to the same
passes as reading the whole prompt, so logits are the same bit for bit. Conversations are kept when
another replaces them in the target's cache; on disk, when closed after several prompts. A prompt
reuses one from disk only if it continues its last prompt, as it would have without the restart.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Condition

import numpy as np

from edge_spec.engine.snapshot_file import (
    Description,
    Snapshot,
    read_snapshot,
    read_text,
    write_snapshot,
)
from edge_spec.errors import SnapshotError
from edge_spec.models.devices import free_bytes
from edge_spec.storage.atomic import remove_oldest
from edge_spec.storage.measurements import tell_unkept

PREFILL_TOKENS = 256  # per pass, between checks for cancellation
LEAST_TOKENS = 256  # shortest conversation worth keeping or reusing
# Tokens at the end of a prompt that the next one may lack: they ask for the answer or, where
# templates drop thoughts, begin one.
LONGEST_TAIL = 64
MAX_BYTES = 1_000_000_000  # of all states in memory
MAX_FILE_BYTES = 4_000_000_000  # of all files in a directory
SUFFIX, CONVERSATION_SUFFIX = ".prompt", ".conversation"
_SHARE = 4  # multiple of a state's bytes that must be free
_LOOK_S = 0.05  # between checks for cancellation while waiting
_DIGITS = 32
_PROMPTED = "prompted"  # key in a note

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state of a target's cache after `tokens`, [length] int32.

    state: None if on disk at `path`. num_prompted: length of a conversation's last prompt; None for
    a prefix. num_whole, noise: as in `Conversation`. has_gone_on: a conversation with several
    prompts, which may get more.
    """

    tokens: np.ndarray
    state: Mapping[str, np.ndarray] | None
    num_prompted: int | None = None
    num_whole: int = 0
    noise: float = 0.0
    has_gone_on: bool = False
    path: Path | None = None

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.state or {}).values())

    @property
    def is_conversation(self) -> bool:
        return self.num_prompted is not None

    def usable(self, prompt: np.ndarray, can_cut: bool) -> int:
        """Return how many tokens of a prompt it saves. can_cut: part of a prefix is usable."""
        shared = common(self.tokens, prompt)
        if self.num_prompted is None:
            return whole_passes(shared) if can_cut or shared == len(self.tokens) else 0
        goes_on = self.path is None or shared >= self.num_prompted - LONGEST_TAIL
        return shared if goes_on else 0

    def replaces(self, earlier: KeptState, can_cut: bool) -> bool:
        """Return True if it continues the earlier one, making that useless."""
        if self.is_conversation != earlier.is_conversation:
            return False
        if self.is_conversation:
            return common(self.tokens, earlier.tokens) >= len(earlier.tokens) - LEAST_TOKENS
        return self.usable(earlier.tokens, can_cut) == len(earlier.tokens)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most


def whole_passes(length: int) -> int:
    """Return how many of `length` tokens are in whole passes."""
    return max(0, length) // PREFILL_TOKENS * PREFILL_TOKENS


class StateFiles:
    """One model's kept states on disk, for an engine and its forks. Thread-safe.

    key: changes with whatever may change a bit of a state. max_bytes: of all files in the
    directory, other models' included; the least recently used go first.
    """

    def __init__(self, directory: Path, key: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.directory = directory
        self.key = key
        self._max_bytes = max_bytes
        self._writer = ThreadPoolExecutor(1, "prompt-cache")
        self._writing: Future[None] | None = None  # the last write
        self._listed: dict[Path, KeptState] = {}  # by the last listing

    def alike(self, tokens: np.ndarray) -> list[KeptState]:
        """Return the states with the same first pass, without arrays. Removes damaged files, with a
        log."""
        if len(tokens) < PREFILL_TOKENS:
            return []
        listed = {}
        for path in self.directory.glob(f"{self._first_pass(tokens)}-*"):
            try:
                listed[path] = self._listed.get(path) or _kept(path, *read_text(path))
            except SnapshotError as error:
                self.forget(path, error)
            except OSError:  # removed by another process
                continue
        self._listed = listed
        return list(listed.values())

    def load(self, listed: KeptState) -> KeptState | None:
        """Return it with its arrays, or None. Removes a damaged file, with a log."""
        path = listed.path
        assert path is not None
        try:
            snapshot = read_snapshot(path)
            if snapshot.description.fingerprint != self.key:
                raise SnapshotError(f"{path} is of another model", remedy="It is read again.")
        except SnapshotError as error:
            self.forget(path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used go first
        loaded = _kept(path, snapshot.description, snapshot.tokens)
        return replace(loaded, state=snapshot.cache)

    def forget(self, path: Path, why: Exception) -> None:
        if path.is_file():  # else removed by another process
            _log.warning("a kept prompt cannot be used and is read again: %s", why)
            with suppress(OSError):
                path.unlink()

    def write(self, kept: Sequence[KeptState]) -> None:
        """Write in another thread, then remove the conversations that these continue. Skips them if
        earlier ones are still being written."""
        if kept and (self._writing is None or self._writing.done()):
            self._writing = self._writer.submit(self._write_all, kept)

    def flush(self) -> None:
        """Wait until everything is written."""
        error = None if self._writing is None else self._writing.exception()
        if isinstance(error, Exception):
            tell_unkept(self.directory, error)

    def _write_all(self, kept: Sequence[KeptState]) -> None:
        for each in kept:
            self._write(each)

    def _write(self, kept: KeptState) -> None:
        suffix = CONVERSATION_SUFFIX if kept.is_conversation else SUFFIX
        path = self.directory / f"{self._first_pass(kept.tokens)}-{_digest(kept.tokens)}{suffix}"
        if kept.num_bytes > self._max_bytes or path.is_file():
            return
        description = Description(
            model="",
            fingerprint=self.key,
            computing="",
            drafts=(),
            exact=False,
            noise=kept.noise,
            plain_s=(),
            learnt={},
            note={_PROMPTED: kept.num_prompted} if kept.is_conversation else None,
        )
        try:
            write_snapshot(path, Snapshot(description, kept.tokens, kept.state or {}, {}))
        except SnapshotError as error:
            tell_unkept(path, error)
            return
        for each in self.alike(kept.tokens) if kept.is_conversation else ():
            if each.path not in (None, path) and kept.replaces(each, can_cut=False):
                with suppress(OSError):  # removed by another process
                    each.path.unlink()
        # The directory may hold other files.
        suffixes = (SUFFIX, CONVERSATION_SUFFIX)
        ours = (path for path in self.directory.glob("*") if path.suffix in suffixes)
        remove_oldest(ours, self._max_bytes)

    def _first_pass(self, tokens: np.ndarray) -> str:
        return _digest(tokens[:PREFILL_TOKENS], self.key)


def _kept(path: Path, description: Description, tokens: np.ndarray) -> KeptState:
    prompted = (description.note or {}).get(_PROMPTED)
    if isinstance(prompted, int):
        noise = description.noise
        return KeptState(tokens, None, prompted, noise=noise, has_gone_on=True, path=path)
    return KeptState(tokens, None, num_whole=len(tokens), path=path)


def _digest(tokens: np.ndarray, key: str = "") -> str:
    return hashlib.sha256(key.encode() + tokens.astype("<i4").tobytes()).hexdigest()[:_DIGITS]


class PromptCache:
    """What a model's conversations have read and are reading. Thread-safe."""

    def __init__(self, files: StateFiles | None = None, max_bytes: int = MAX_BYTES) -> None:
        """files: store beyond the process, if any. max_bytes: of states in memory; the least
        recently used go first."""
        self.files = files
        self.changed = Condition()  # guards readings
        self._max_bytes = max_bytes
        self._num_conversations = 0
        self._kept: list[KeptState] = []  # least recently used first
        self._readings: list[Reading] = []  # in progress, oldest first
        self.can_cut = True  # whether part of a prefix is usable

    def join(self) -> None:
        """Count a conversation as opened."""
        with self.changed:
            self._num_conversations += 1

    def leave(self) -> None:
        """Count a conversation as closed; return once its states are on disk."""
        with self.changed:
            self._num_conversations -= 1
            is_last = not self._num_conversations
        if self.files is not None:
            self.files.flush()
            if is_last:
                kept = self.clear()
                self.files.write([each for each in kept if each.has_gone_on])
                self.files.flush()

    def clear(self) -> list[KeptState]:
        """Drop all states in memory and return them."""
        with self.changed:
            kept, self._kept = self._kept, []
        return kept

    @property
    def is_shared(self) -> bool:
        return self._num_conversations > 1

    @property
    def num_bytes(self) -> int:
        with self.changed:
            return sum(each.num_bytes for each in self._kept)

    def keep(self, new: KeptState) -> None:
        """Keep a state, unless memory is short, and drop those that it replaces."""
        free = free_bytes()
        if new.num_bytes > self._max_bytes or (free is not None and _SHARE * new.num_bytes > free):
            return
        with self.changed:
            others = (each for each in self._kept if not new.replaces(each, self.can_cut))
            self._kept = [*others, new]
            left = sum(each.num_bytes for each in self._kept)
            while left > self._max_bytes:
                left -= self._kept.pop(0).num_bytes

    def conversation(self, prompt: np.ndarray, more_than: int) -> tuple[KeptState, int] | None:
        """Return the conversation sharing most tokens with the prompt, if over `more_than`, and how
        many. Drops it from memory if the prompt continues at least half of it."""
        conversations = [each for each in self._all(prompt, True) if each.is_conversation]
        found = self._longest(conversations, prompt, more_than)
        if found is not None and 2 * found[1] >= len(found[0].tokens):
            with self.changed:
                self._kept = [each for each in self._kept if each is not found[0]]
        return found

    def beginning(
        self, prompt: np.ndarray, more_than: int, in_memory: bool
    ) -> tuple[KeptState, int] | None:
        """Return the prefix saving most tokens of the prompt, if over `more_than`, and how many."""
        return self._longest(self._beginnings(prompt, in_memory), prompt, more_than)

    def _longest(
        self, kept: Sequence[KeptState], prompt: np.ndarray, more_than: int
    ) -> tuple[KeptState, int] | None:
        found = [(each.usable(prompt, self.can_cut), each) for each in kept]
        for length, each in sorted(found, key=lambda each: each[0], reverse=True):
            if length <= more_than:
                break
            if each.state is not None:
                with self.changed:
                    self._kept.sort(key=lambda other: other is each)  # mark as used last
                return each, length
            assert self.files is not None
            loaded = self.files.load(each)
            if loaded is not None and loaded.usable(prompt, self.can_cut) == length:
                return loaded, length
        return None

    def _beginnings(self, prompt: np.ndarray, in_memory: bool) -> list[KeptState]:
        return [each for each in self._all(prompt, in_memory) if not each.is_conversation]

    def _all(self, prompt: np.ndarray, in_memory: bool) -> list[KeptState]:
        """Return the states that may share a prefix with the prompt, those in memory first."""
        with self.changed:
            kept = self._kept.copy() if in_memory else []
        return kept if self.files is None else kept + self.files.alike(prompt)

    def refuse(self, kept: KeptState, why: ValueError) -> None:
        """Forget a state on disk that the target rejects."""
        if kept.path is not None and self.files is not None:
            self.files.forget(kept.path, why)

    def want(self, reading: Reading) -> None:
        """Have a reading keep missing prefixes: near its end and, if only whole ones are usable,
        where other prompts diverge."""
        prompt = reading.prompt[:-1]
        kept = self._beginnings(prompt, True)
        wanted = {whole_passes(len(prompt) - LONGEST_TAIL)}
        if not self.can_cut:
            wanted |= {whole_passes(common(each.tokens, prompt)) for each in kept}
        with self.changed:
            reading.wanted |= {
                length
                for length in wanted - {0}
                if all(each.usable(prompt[:length], self.can_cut) < length for each in kept)
            }

    def add(self, reading: Reading) -> None:
        """Let others wait for a reading."""
        with self.changed:
            self._readings.append(reading)

    def remove(self, reading: Reading) -> None:
        """End a reading for those that wait for it."""
        with self.changed:
            if reading in self._readings:
                self._readings.remove(reading)
            self.changed.notify_all()

    def reach(self, reading: Reading, length: int, num_whole: int) -> None:
        """Wake waiters: the reading at `length` was kept or cannot be."""
        with self.changed:
            reading.length, reading.num_whole = length, num_whole
            reading.wanted.discard(length)
            self.changed.notify_all()

    def wait(self, reading: Reading, held: int, cancelled: Callable[[], bool]) -> bool:
        """Wait while another conversation reads a longer shared prefix; return True if it waited.

        Ends when the state is kept, the other reading ends or this one is cancelled. Nobody waits
        for a waiting reading, so some conversation always reads. held: tokens held.
        """
        with self.changed:
            places = (
                (each.place_for(reading, held, self.can_cut), each) for each in self._readings
            )
            place, source = next((found for found in places if found[0]), (0, None))
            if source is None:
                return False
            source.wanted.add(place)
            reading.is_waiting = True
            try:
                while source in self._readings and source.length < place and not cancelled():
                    self.changed.wait(_LOOK_S)
            finally:
                reading.is_waiting = False
                reading.tried.append(source)
            return True


@dataclass(eq=False)
class Reading:
    """A prompt being read, as others see it. Guarded by `PromptCache.changed`.

    length: tokens held. num_whole: those from whole passes. wanted: lengths to keep for others.
    tried: readings that it has waited for.
    """

    prompt: np.ndarray
    length: int = 0
    num_whole: int = 0
    is_waiting: bool = False
    wanted: set[int] = field(default_factory=set)
    tried: list[Reading] = field(default_factory=list)

    def place_for(self, other: Reading, held: int, can_cut: bool) -> int:
        """Return the length where this reading can help one that holds `held` tokens; 0 if it
        cannot."""
        if self is other or self.is_waiting or self in other.tried:
            return 0
        shared = whole_passes(common(self.prompt[:-1], other.prompt[:-1]))
        place = max(shared, self.length + PREFILL_TOKENS)
        is_ahead = self.num_whole == self.length >= held and shared > held
        is_of_use = place < len(self.prompt) and (can_cut or place == shared)
        return place if is_ahead and is_of_use else 0
