"""States of a target's cache that are kept, so that text is read once: in memory for all
conversations on one model, and on disk from one process to the next.

Kept are beginnings of prompts and, in memory, whole conversations. A prompt is read in passes of
PREFILL_TOKENS, and a beginning is a state after such passes and nothing else. Who takes it up goes
on with the very passes that reading the whole prompt would have had: the logits are the same bit
for bit. A conversation is kept when another one takes its place in the target's cache, and goes on
as if nothing had come between.
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
    read_tokens,
    write_snapshot,
)
from edge_spec.errors import SnapshotError
from edge_spec.models.devices import free_bytes
from edge_spec.storage.atomic import remove_oldest
from edge_spec.storage.measurements import tell_unkept

PREFILL_TOKENS = 256  # of a pass; between two looks at whether the generation was cancelled
LEAST_TOKENS = 256  # of a conversation that is worth keeping, or taking up again
# Tokens at the end of a prompt that the next one of the conversation may not have: those that ask
# for the answer, and where templates drop thoughts, those that begin one.
LONGEST_TAIL = 64
MAX_BYTES = 1_000_000_000  # of all states in memory
MAX_FILE_BYTES = 4_000_000_000  # of all files in a directory
SUFFIX = ".prompt"
_SHARE = 4  # times the bytes of a state, which have to be free
_LOOK_S = 0.05  # between two looks at whether who waits was cancelled
_DIGITS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state of a target's cache after `tokens`, [length] int32.

    state: None: it is on disk, at `path`. num_prompted: tokens of the last prompt of a
    conversation; None: a beginning of a prompt. num_whole, noise: as `Conversation` has them.
    """

    tokens: np.ndarray
    state: Mapping[str, np.ndarray] | None
    num_prompted: int | None = None
    num_whole: int = 0
    noise: float = 0.0
    path: Path | None = None

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.state or {}).values())

    @property
    def is_conversation(self) -> bool:
        return self.num_prompted is not None

    def usable(self, prompt: np.ndarray, can_cut: bool) -> int:
        """Return how many tokens of a prompt it is of use for. can_cut: whether a part of a
        beginning is."""
        shared = common(self.tokens, prompt)
        if self.is_conversation:
            return shared
        return whole_passes(shared) if can_cut or shared == len(self.tokens) else 0

    def replaces(self, earlier: KeptState, can_cut: bool) -> bool:
        """Return whether it has gone on from the earlier one, which is of no more use then."""
        if self.is_conversation != earlier.is_conversation:
            return False
        if self.is_conversation:
            return common(self.tokens, earlier.tokens) >= len(earlier.tokens) - LEAST_TOKENS
        return self.usable(earlier.tokens, can_cut) == len(earlier.tokens)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens both begin with."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most


def whole_passes(length: int) -> int:
    """Return how many of `length` tokens whole passes read."""
    return max(0, length) // PREFILL_TOKENS * PREFILL_TOKENS


class StateFiles:
    """The beginnings of prompts of one model on disk, as one engine and its forks compute them. Any
    thread may call.

    key: changes with whatever may change a bit of a state. max_bytes: of all files in the
    directory, of other models too; those that were used last stay.
    """

    def __init__(self, directory: Path, key: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.directory = directory
        self.key = key
        self._max_bytes = max_bytes
        self._writer = ThreadPoolExecutor(1, "prompt-cache")
        self._writing: Future[None] | None = None  # the last of them
        self._listed: dict[Path, KeptState] = {}  # the last time

    def alike(self, tokens: np.ndarray) -> list[KeptState]:
        """Return those with the same first pass, without their states. A damaged file is removed,
        which one line says."""
        if len(tokens) < PREFILL_TOKENS:
            return []
        listed = {}
        for path in self.directory.glob(f"{self._first_pass(tokens)}-*{SUFFIX}"):
            try:
                listed[path] = self._listed.get(path) or _at(path, read_tokens(path))
            except SnapshotError as error:
                self.forget(path, error)
            except OSError:  # another process has removed it
                continue
        self._listed = listed
        return list(listed.values())

    def load(self, listed: KeptState) -> KeptState | None:
        """Return it with its state. A damaged file is removed, which one line says."""
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
            os.utime(path)  # the least recently used one goes first
        return replace(_at(path, snapshot.tokens), state=snapshot.cache)

    def forget(self, path: Path, why: Exception) -> None:
        if path.is_file():  # else another process has removed it
            _log.warning("a kept prompt cannot be used and is read again: %s", why)
            with suppress(OSError):
                path.unlink()

    def write(self, kept: Sequence[KeptState]) -> None:
        """Write in another thread. They are not kept where the disk is so slow that it still writes
        those before them."""
        if kept and (self._writing is None or self._writing.done()):
            self._writing = self._writer.submit(self._write_all, kept)

    def flush(self) -> None:
        """Return when everything is written."""
        error = None if self._writing is None else self._writing.exception()
        if isinstance(error, Exception):
            tell_unkept(self.directory, error)

    def _write_all(self, kept: Sequence[KeptState]) -> None:
        for each in kept:
            self._write(each)

    def _write(self, kept: KeptState) -> None:
        path = self.directory / f"{self._first_pass(kept.tokens)}-{_digest(kept.tokens)}{SUFFIX}"
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
            note=None,
        )
        try:
            write_snapshot(path, Snapshot(description, kept.tokens, kept.state or {}, {}))
        except SnapshotError as error:
            tell_unkept(path, error)
            return
        # The directory may have files of others, too.
        remove_oldest(self.directory.glob(f"*{SUFFIX}"), self._max_bytes)

    def _first_pass(self, tokens: np.ndarray) -> str:
        return _digest(tokens[:PREFILL_TOKENS], self.key)


def _at(path: Path, tokens: np.ndarray) -> KeptState:
    return KeptState(tokens, None, num_whole=len(tokens), path=path)


def _digest(tokens: np.ndarray, key: str = "") -> str:
    return hashlib.sha256(key.encode() + tokens.astype("<i4").tobytes()).hexdigest()[:_DIGITS]


class PromptCache:
    """Knows what the conversations on one model have read, and what they read now. Any thread may
    call."""

    def __init__(self, files: StateFiles | None = None, max_bytes: int = MAX_BYTES) -> None:
        """files: where states are kept beyond the process, if they are. max_bytes: of those in
        memory; those that were used last stay."""
        self.files = files
        self.can_cut = True  # whether a part of a beginning is of use, not all of it alone
        self._changed = Condition()  # held while states and readings are looked at, or changed
        self._max_bytes = max_bytes
        self._num_conversations = 0
        self._kept: list[KeptState] = []  # the one that was used last is last
        self._readings: list[Reading] = []  # that are still to keep something, the first one first

    def join(self) -> None:
        """Count a conversation that is opened."""
        with self._changed:
            self._num_conversations += 1

    def leave(self) -> None:
        """Count one that is closed; return when its prompts are on disk."""
        with self._changed:
            self._num_conversations -= 1
        if self.files is not None:
            self.files.flush()

    def clear(self) -> None:
        """Forget all states in memory."""
        with self._changed:
            self._kept = []

    @property
    def is_shared(self) -> bool:
        """True while there are several conversations."""
        return self._num_conversations > 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that are in memory now."""
        with self._changed:
            return sum(each.num_bytes for each in self._kept)

    def keep(self, new: KeptState) -> None:
        """Keep a state in memory, unless that is short; those that it replaces are dropped."""
        free = free_bytes()
        if new.num_bytes > self._max_bytes or (free is not None and _SHARE * new.num_bytes > free):
            return
        with self._changed:
            others = (each for each in self._kept if not new.replaces(each, self.can_cut))
            self._kept = [*others, new]
            left = sum(each.num_bytes for each in self._kept)
            while left > self._max_bytes:
                left -= self._kept.pop(0).num_bytes

    def conversation(self, prompt: np.ndarray, more_than: int) -> tuple[KeptState, int] | None:
        """Return the conversation that shares most tokens with the prompt, if they are more than
        that, and how many. It is kept no longer where the prompt goes on from most of it."""
        with self._changed:
            conversations = [each for each in self._kept if each.is_conversation]
        found = self._longest(conversations, prompt, more_than)
        if found is not None and 2 * found[1] >= len(found[0].tokens):
            with self._changed:
                self._kept = [each for each in self._kept if each is not found[0]]
        return found

    def beginning(
        self, prompt: np.ndarray, more_than: int, in_memory: bool
    ) -> tuple[KeptState, int] | None:
        """Return the beginning that is of use for most tokens of the prompt, if they are more than
        that, and for how many. in_memory: whether it may be one in memory."""
        return self._longest(self._beginnings(prompt, in_memory), prompt, more_than)

    def _longest(
        self, kept: Sequence[KeptState], prompt: np.ndarray, more_than: int
    ) -> tuple[KeptState, int] | None:
        found = [(each.usable(prompt, self.can_cut), each) for each in kept]
        for length, each in sorted(found, key=lambda each: each[0], reverse=True):
            if length <= more_than:
                break
            if each.state is not None:
                with self._changed:
                    self._kept.sort(key=lambda other: other is each)  # now it was used last
                return each, length
            assert self.files is not None
            loaded = self.files.load(each)
            if loaded is not None and loaded.usable(prompt, self.can_cut) == length:
                return loaded, length
        return None

    def _beginnings(self, prompt: np.ndarray, in_memory: bool) -> list[KeptState]:
        """Return what may begin like a prompt, what is in memory first."""
        with self._changed:
            kept = [each for each in self._kept if in_memory and not each.is_conversation]
        return kept if self.files is None else kept + self.files.alike(prompt)

    def refuse(self, kept: KeptState, why: ValueError) -> None:
        """Forget a state on disk that the target does not take."""
        if kept.path is not None and self.files is not None:
            self.files.forget(kept.path, why)

    def want(self, reading: Reading, held: int) -> None:
        """Have a reading, of which `held` tokens are read, keep beginnings for others that are not
        kept yet: where its end is still to come, and, if a part of a beginning is of no use, where
        another one has parted from it."""
        prompt = reading.prompt[:-1]
        kept = self._beginnings(prompt, True)
        wanted = {whole_passes(len(prompt) - LONGEST_TAIL)}
        if not self.can_cut:
            wanted |= {whole_passes(common(each.tokens, prompt)) for each in kept}
        reading.wanted = {
            length
            for length in wanted
            if length >= max(held, 1)
            and all(each.usable(prompt[:length], self.can_cut) < length for each in kept)
        }

    def wait(self, reading: Reading, held: int, cancelled: Callable[[], bool]) -> bool:
        """Wait while another conversation is going to keep more of the same beginning than the
        `held` tokens: until it has, cannot, or this one is cancelled. Return whether it has waited;
        others wait for this reading from then on where it has not.

        Nobody waits for one that waits, so some conversation always reads."""
        with self._changed:
            if not self._is_awaited(reading, held):
                self._readings.append(reading)
                return False
            while self._is_awaited(reading, held) and not cancelled():
                self._changed.wait(_LOOK_S)
            return True

    def _is_awaited(self, reading: Reading, held: int) -> bool:
        return any(each.gives(reading.prompt, self.can_cut) > held for each in self._readings)

    def settle(self, reading: Reading, length: int | None = None) -> None:
        """Tell those that wait that what they want of a reading at `length` was kept, or cannot be;
        None: that it keeps nothing more."""
        with self._changed:
            reading.wanted -= reading.wanted.copy() if length is None else {length}
            if not reading.wanted and reading in self._readings:
                self._readings.remove(reading)
            self._changed.notify_all()


@dataclass(eq=False)
class Reading:
    """A prompt while a conversation reads it. wanted: lengths at which its state is still to be
    kept for others."""

    prompt: np.ndarray
    wanted: set[int] = field(default_factory=set)

    def gives(self, prompt: np.ndarray, can_cut: bool) -> int:
        """Return how many tokens of another prompt it will be of use for. can_cut: whether a part
        of a beginning is."""
        shared = whole_passes(common(self.prompt[:-1], prompt[:-1])) if self.wanted else 0
        usable = (min(place, shared) for place in self.wanted if can_cut or place <= shared)
        return max(usable, default=0)
