"""The beginnings that prompts have in common are read once: by the conversations on one model while
there are several, and from one process to the next where they are kept on disk.

A prompt is read in passes of PREFILL_TOKENS from its beginning, and a state is kept only where one
of these passes ended, with nothing but such passes before it. Who takes it up goes on with the very
passes that reading the whole prompt would have had: the logits are the same bit for bit. Each
conversation has a copy of its own.

Conversations whose place in a target's cache another one has taken are kept in memory, and whole
ones beside the kept prompts on disk: they go on as if nothing had come between.

After a restart a prompt takes one up only where it goes on from the conversation's last prompt:
then its state is the one that would have been there without the restart. What else begins alike has
the kept prompts, whose states are those of reading them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock

import numpy as np

from edge_spec.engine.snapshot_file import (
    CONVERSATION_SUFFIX,
    PREFILL_TOKENS,
    KeptPrompt,
    PromptFiles,
    read_tokens,
)
from edge_spec.errors import SnapshotError
from edge_spec.models.devices import free_bytes

MAX_KEPT_BYTES = 1_000_000_000  # of all of them
LEAST_TOKENS = 256  # that are worth keeping, or taking up again: fewer are read in no time
# Tokens at the end of a prompt that the next one of the conversation may not have: those that ask
# for the answer, and where templates drop thoughts, those that begin one.
LONGEST_TAIL = 64
_SHARE = 4  # times the bytes of a state, which have to be free


@dataclass(frozen=True, eq=False)
class KeptConversation:
    """tokens: [length] int32, whose state it is. num_prompted: tokens of its last prompt.
    num_whole, noise: as `Conversation` has them. has_gone_on: whether it has had several prompts,
    and may be expected to have more."""

    tokens: np.ndarray
    state: Mapping[str, np.ndarray]
    num_prompted: int = 0
    num_whole: int = 0
    noise: float = 0.0
    has_gone_on: bool = True

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.state.values())


class KeptConversations:
    """Those of one model. Any thread may call."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """max_bytes: those that were used last stay."""
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: list[KeptConversation] = []  # the one that was used last is last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(each.num_bytes for each in self._kept)

    def keep(self, new: KeptConversation) -> None:
        """Those that it goes on from are dropped. It is not kept where memory is short."""
        free = free_bytes()
        if new.num_bytes > self._max_bytes or (free is not None and _SHARE * new.num_bytes > free):
            return
        with self._lock:
            others = (each for each in self._kept if not goes_on(new.tokens, each.tokens))
            self._kept = [*others, new]
            left = sum(each.num_bytes for each in self._kept)
            while left > self._max_bytes:
                left -= self._kept.pop(0).num_bytes

    def take(self, prompt: np.ndarray, more_than: int) -> tuple[KeptConversation, int] | None:
        """Returns the one that shares most tokens with the prompt, if they are more than that, and
        how many. It is kept no longer where the prompt goes on from most of it."""
        with self._lock:
            found = [(common(each.tokens, prompt), each) for each in self._kept]
            shared, kept = max(found, key=lambda each: each[0], default=(0, None))
            if kept is None or shared <= more_than:
                return None
            self._kept.remove(kept)
            if 2 * shared < len(kept.tokens):
                self._kept.append(kept)
            return kept, shared

    def clear(self) -> list[KeptConversation]:
        """Forgets all of them, and returns them."""
        with self._lock:
            kept, self._kept = self._kept, []
        return kept


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens both begin with."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most


def goes_on(tokens: np.ndarray, earlier: np.ndarray) -> bool:
    """Says whether these tokens go on from nearly all of the earlier ones."""
    return common(tokens, earlier) >= len(earlier) - LEAST_TOKENS


_DIGITS = 32
_PROMPTED = "prompted"  # in a note


class ConversationFiles:
    """Those of one model, within the bound of `files`. Any thread may call."""

    def __init__(self, files: PromptFiles) -> None:
        self._files = files

    def take(self, prompt: np.ndarray, more_than: int) -> tuple[KeptConversation, int] | None:
        """Returns the one that shares most tokens with the prompt, if they are more than that, and
        how many. A damaged file is removed, which one line says."""
        found = [(common(tokens, prompt), path) for path, tokens in self._alike(prompt).items()]
        for shared, path in sorted(found, reverse=True):
            if shared <= more_than:
                break
            snapshot = self._files.read(path)
            if snapshot is None or common(snapshot.tokens, prompt) != shared:
                continue
            prompted = (snapshot.description.note or {}).get(_PROMPTED)
            if isinstance(prompted, int) and shared >= prompted - LONGEST_TAIL:
                noise = snapshot.description.noise
                kept = KeptConversation(snapshot.tokens, snapshot.cache, prompted, noise=noise)
                return kept, shared
        return None

    def write(self, kept: KeptConversation) -> None:
        """Writes it in another thread, and removes what it has gone on from, unless it cannot be
        kept."""
        name = f"{self._beginning(kept.tokens)}-{_digest(kept.tokens)}{CONVERSATION_SUFFIX}"
        path = self._files.directory / name
        earlier = [
            each
            for each, tokens in self._alike(kept.tokens).items()
            if each != path and goes_on(kept.tokens, tokens)
        ]
        note = {_PROMPTED: kept.num_prompted}
        is_kept = self._files.write({path: KeptPrompt(kept.tokens, kept.state, kept.noise, note)})
        for each in earlier if is_kept else ():
            with suppress(OSError):  # another process has removed it
                each.unlink()

    def _alike(self, tokens: np.ndarray) -> dict[Path, np.ndarray]:
        """Returns the tokens of those that begin like these, as their files say."""
        found = {}
        if len(tokens) >= LEAST_TOKENS:
            alike = f"{self._beginning(tokens)}-*{CONVERSATION_SUFFIX}"
            for path in self._files.directory.glob(alike):
                with suppress(SnapshotError, OSError):
                    found[path] = read_tokens(path)
        return found

    def _beginning(self, tokens: np.ndarray) -> str:
        return _digest(tokens[:LEAST_TOKENS], self._files.key)


def _digest(tokens: np.ndarray, key: str = "") -> str:
    return hashlib.sha256(key.encode() + tokens.astype("<i4").tobytes()).hexdigest()[:_DIGITS]


MAX_BYTES = 256_000_000  # of all states in memory
_LOOK_S = 0.05  # between two looks at whether who waits was cancelled


class Reading:
    """One prompt while it is read, as other conversations see it. It is changed under the lock of
    the cache.

    length: tokens that its conversation holds. num_whole: of them, that whole passes have written.
    wanted: lengths at which its state is kept for others. tried: readings it has waited for.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = np.array(prompt, np.int32)
        self.length = self.num_whole = 0
        self.is_waiting = False
        self.wanted: set[int] = set()
        self.tried: list[Reading] = []

    def may_give(self, other: Reading, held: int, can_cut: bool) -> bool:
        """Tells whether the other one, which holds `held` tokens, gains by waiting for this one.
        can_cut: whether the beginning of a state is of use."""
        if self is other or self.is_waiting or self in other.tried:
            return False
        shared = self._shared(other)
        is_ahead = self.num_whole == self.length >= held
        place = self._place(shared)
        return is_ahead and shared > held and place > 0 and (can_cut or place == shared)

    def want(self, other: Reading) -> int:
        """Returns the length at which this one keeps what the other one can use."""
        place = self._place(self._shared(other))
        self.wanted.add(place)
        return place

    def _shared(self, other: Reading) -> int:
        """Returns how many tokens both begin with, by whole passes, of which both read more."""
        return whole_passes(common(self.tokens[:-1], other.tokens[:-1]))

    def _place(self, shared: int) -> int:
        """Returns the next length from `shared` on that it has not reached yet; 0 where it reads no
        more whole passes."""
        place = max(shared, self.length + PREFILL_TOKENS)
        return place if place < len(self.tokens) else 0


class PromptCache:
    """Knows what the conversations on one model have read, and what they read now. Any thread may
    call."""

    def __init__(self, files: PromptFiles | None = None, max_bytes: int = MAX_BYTES) -> None:
        """files: where prompts are kept beyond the process, if they are. max_bytes: of the states
        in memory; those that were used last stay."""
        self.files = files
        self.conversations = KeptConversations()
        self.conversation_files = None if files is None else ConversationFiles(files)
        self._max_bytes = max_bytes
        self._changed = Condition()
        self._num_conversations = 0
        self._kept: list[KeptPrompt] = []  # the one that was used last is last
        self._readings: list[Reading] = []  # that go on now, the first one first
        self._can_cut = True  # whether the beginning of a state is of use

    def join(self) -> None:
        """Counts a conversation that is opened."""
        with self._changed:
            self._num_conversations += 1

    def leave(self) -> None:
        """Counts one that is closed; returns when its prompts are on disk."""
        with self._changed:
            self._num_conversations -= 1
            if not self.is_shared:
                self._kept.clear()
            is_last = not self._num_conversations
        if is_last:
            for kept in self.conversations.clear():
                if self.conversation_files is not None and kept.has_gone_on:
                    self.conversation_files.write(kept)
        if self.files is not None:
            self.files.flush()

    @property
    def is_shared(self) -> bool:
        """True while there are several conversations."""
        return self._num_conversations > 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that are in memory now."""
        with self._changed:
            return sum(each.num_bytes for each in self._kept)

    def add(self, reading: Reading) -> None:
        """Lets others wait for a reading."""
        with self._changed:
            self._readings.append(reading)

    def remove(self, reading: Reading) -> None:
        """Ends a reading for those that wait for it."""
        with self._changed:
            if reading in self._readings:
                self._readings.remove(reading)
            self._changed.notify_all()

    def longest(self, tokens: np.ndarray) -> tuple[KeptPrompt, int] | None:
        """Returns what begins like these tokens for longest, and how many tokens long: whole passes
        that leave at least one token to read. It counts as used."""
        with self._changed:
            found = [(self._usable(each, tokens[:-1]), each) for each in self._kept]
            length, kept = max(found, key=lambda each: each[0], default=(0, None))
            if kept is None or not length:
                return None
            self._kept.remove(kept)
            self._kept.append(kept)
            return kept, length

    def take(self, prompt: np.ndarray, more_than: int) -> tuple[KeptConversation, int] | None:
        """Returns the conversation in memory, else on disk, that shares most tokens with the
        prompt, if they are more than that, and how many."""
        found = self.conversations.take(prompt, more_than)
        if found is None and self.conversation_files is not None:
            found = self.conversation_files.take(prompt, more_than)
        return found

    def has(self, tokens: np.ndarray) -> bool:
        """Tells whether what is in memory is of use for all of these."""
        with self._changed:
            return any(self._usable(each, tokens) == len(tokens) for each in self._kept)

    def _usable(self, kept: KeptPrompt, tokens: np.ndarray) -> int:
        """Returns how many of these tokens it is of use for."""
        shared = common(kept.tokens, tokens)
        return whole_passes(shared) if self._can_cut or shared == len(kept.tokens) else 0

    def cut_in_vain(self) -> None:
        """Takes each state for texts that begin with all of its tokens from now on: a sliding
        window has forgotten what going on within them needs."""
        with self._changed:
            self._can_cut = False

    def keep(self, new: KeptPrompt) -> None:
        """Keeps a state in memory; those that are a beginning of it are dropped."""
        with self._changed:
            if not self.is_shared or new.num_bytes > self._max_bytes:
                return
            self._kept = [
                *(each for each in self._kept if self._usable(new, each.tokens) < len(each.tokens)),
                new,
            ]
            left = sum(each.num_bytes for each in self._kept)
            while left > self._max_bytes:
                left -= self._kept.pop(0).num_bytes

    def wait(self, reading: Reading, held: int, cancelled: Callable[[], bool]) -> bool:
        """Waits while another conversation reads more of the same beginning than the `held` tokens:
        until it has kept them, has ended, or this one is cancelled. Returns whether it has waited.

        Nobody waits for one that waits, so some conversation always reads."""
        with self._changed:
            source = next(
                (each for each in self._readings if each.may_give(reading, held, self._can_cut)),
                None,
            )
            if source is None:
                return False
            place = source.want(reading)
            reading.is_waiting = True
            try:
                while source in self._readings and source.length < place and not cancelled():
                    self._changed.wait(_LOOK_S)
            finally:
                reading.is_waiting = False
                reading.tried.append(source)
            return True

    def advance(self, reading: Reading, length: int, num_whole: int) -> bool:
        """Notes that a reading has `length` tokens, `num_whole` of them by whole passes. Returns
        whether others want this state; then `reach` says when they can have it."""
        with self._changed:
            reading.num_whole = num_whole
            wanted = length == num_whole and length in reading.wanted
            if not wanted:  # else it may be taken before anybody looks for it
                self.reach(reading, length)
            return wanted

    def reach(self, reading: Reading, length: int) -> None:
        """Notes that what is wanted at `length` was kept, or cannot be."""
        with self._changed:
            reading.length = length
            self._changed.notify_all()


def whole_passes(length: int) -> int:
    """Returns how many of `length` tokens whole passes read."""
    return max(0, length) // PREFILL_TOKENS * PREFILL_TOKENS
