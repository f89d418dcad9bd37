"""The beginnings that prompts of several conversations on one model share are read once.

As in prompt_cache.py, a state goes from one conversation to another only where a whole pass of
PREFILL_TOKENS has ended, with nothing but such passes before it: who takes it up goes on with the
very passes that reading all of its own prompt would have had, so that no bit changes. Nothing of it
outlives the models; each conversation has a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition

import numpy as np

from edge_spec.core.features import collects
from edge_spec.core.model import Restorable, Session
from edge_spec.core.session_errors import TranslatedErrors, roll_back, translate_errors
from edge_spec.engine.prompt_cache import PREFILL_TOKENS, TAIL_TOKENS

MAX_BYTES = 256_000_000  # of all states that are kept
_LOOK_S = 0.05  # between two looks at whether who waits was cancelled
_AGAIN = 1 / 16  # of what is to be read, that is read again for the sake of others


@dataclass(frozen=True, eq=False)
class _Kept:
    tokens: np.ndarray  # [length] int32
    state: Mapping[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.state.values())


class PromptSharing:
    """Keeps what the conversations on one model have read, while there are several. Any thread may
    call. max_bytes: of the states; those that were used last stay."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._changed = Condition()
        self._num_conversations = 0
        self._kept: list[_Kept] = []  # the one that was used last is last
        self._readings: list[SharedReading] = []  # that go on now, the first one first
        self._can_cut = True  # whether the beginning of a state is of use

    def join(self) -> None:
        """Counts a conversation that is opened."""
        with self._changed:
            self._num_conversations += 1

    def leave(self) -> None:
        """Counts one that is closed."""
        with self._changed:
            self._num_conversations -= 1
            if not self.is_shared:
                self._kept.clear()

    @property
    def is_shared(self) -> bool:
        return self._num_conversations > 1

    @contextmanager
    def begin(self, prompt: Sequence[int]) -> Iterator[SharedReading]:
        """Yields the reading of a prompt, which is read within the block."""
        reading = SharedReading(self, np.array(prompt, np.int32))
        try:
            yield reading
        finally:
            self.remove(reading)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that are kept now."""
        with self._changed:
            return sum(each.num_bytes for each in self._kept)

    def add(self, reading: SharedReading) -> None:
        with self._changed:
            self._readings.append(reading)

    def remove(self, reading: SharedReading) -> None:
        with self._changed:
            if reading in self._readings:
                self._readings.remove(reading)
            self._changed.notify_all()

    def longest(self, tokens: np.ndarray) -> tuple[_Kept, int] | None:
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

    def has(self, tokens: np.ndarray) -> bool:
        """Tells whether what is kept is of use for all of these."""
        with self._changed:
            return any(self._usable(each, tokens) == len(tokens) for each in self._kept)

    def _usable(self, kept: _Kept, tokens: np.ndarray) -> int:
        """Returns how many of these tokens it is of use for."""
        common = _common(kept.tokens, tokens)
        return _whole(common) if self._can_cut or common == len(kept.tokens) else 0

    def cut_in_vain(self) -> None:
        """A sliding window has forgotten what going on within its tokens needs: from now on, each
        state is for texts that begin with all of them."""
        with self._changed:
            self._can_cut = False

    def keep(self, tokens: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Keeps a state; those that are a beginning of it are dropped."""
        new = _Kept(tokens, state)
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

    def wait(self, reading: SharedReading, held: int, cancelled: Callable[[], bool]) -> bool:
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

    def advance(self, reading: SharedReading, length: int, num_whole: int) -> bool:
        """Notes that it holds `length` tokens now, `num_whole` of them by whole passes. Returns
        whether this state is wanted."""
        with self._changed:
            reading.num_whole = num_whole
            wanted = length == num_whole and length in reading.wanted
            if not wanted:  # else it may be taken before anybody looks for it
                self._reach(reading, length)
            return wanted

    def reach(self, reading: SharedReading, length: int) -> None:
        """Notes that what is wanted at `length` was kept, or cannot be."""
        with self._changed:
            self._reach(reading, length)

    def _reach(self, reading: SharedReading, length: int) -> None:
        reading.length = length
        self._changed.notify_all()


@dataclass(eq=False)
class SharedReading:
    """One prompt while it is read, within its block. Where it is, and what others want of it, is
    changed under the lock of `sharing`."""

    sharing: PromptSharing
    tokens: np.ndarray  # [length] int32
    length: int = 0  # tokens that its conversation holds
    num_whole: int = 0  # of them that whole passes have written
    is_waiting: bool = False
    wanted: set[int] = field(default_factory=set)  # lengths at which its state is to be kept
    tried: list[SharedReading] = field(default_factory=list)  # whom it has waited for

    def recall(
        self, target: Session, num_whole: int, cancelled: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Gives the target the longest beginning that another conversation has read, or is reading,
        if that is longer than what it holds. num_whole: of what it holds, by whole passes; where
        the rest is little, it is given up, so that others can have what is read now. Returns how
        much the target then holds, by whole passes; None where nothing was changed. Raises
        SessionError."""
        if not isinstance(target, Restorable) or collects(target) or not self.sharing.is_shared:
            return None
        self.length, self.num_whole = target.length, num_whole
        recalled = self._take_over(target)
        if (
            recalled is None
            and num_whole < self._last
            and self._is_little(target.length, num_whole)
        ):
            recalled = self._cut(target, num_whole)
        self.sharing.add(self)
        while not cancelled() and self.sharing.wait(self, target.length, cancelled):
            found = self._take_over(target)
            recalled = recalled if found is None else found
        if self._last and not self.sharing.has(self.tokens[: self._last]):
            self.wanted.add(self._last)
        return recalled

    def take(self, target: Session, num_whole: int) -> None:
        """Keeps the target's state where it is wanted, between passes. num_whole: tokens at the
        beginning that whole passes have written."""
        length = target.length
        if not self.sharing.advance(self, length, num_whole):
            return
        assert isinstance(target, Restorable)  # else nothing is wanted of it
        try:
            with translate_errors:
                state = target.state()
            if state:
                self.sharing.keep(self.tokens[:length], state)
        finally:
            self.sharing.reach(self, length)

    def may_give(self, other: SharedReading, held: int, can_cut: bool) -> bool:
        """Tells whether the other one, which holds `held` tokens, gains by waiting for this one.
        can_cut: whether the beginning of a state is of use."""
        if self is other or self.is_waiting or self in other.tried:
            return False
        shared = self._shared(other)
        is_ahead = self.num_whole == self.length >= held
        place = self._place(shared)
        return is_ahead and shared > held and place > 0 and (can_cut or place == shared)

    def want(self, other: SharedReading) -> int:
        """Returns the length at which this one keeps what the other one can use."""
        place = self._place(self._shared(other))
        self.wanted.add(place)
        return place

    @property
    def _last(self) -> int:
        """The length after which it is kept for those that come later."""
        return _whole(len(self.tokens) - 1 - TAIL_TOKENS)

    def _is_little(self, held: int, num_whole: int) -> bool:
        return num_whole < held <= num_whole + _AGAIN * (len(self.tokens) - held)

    def _shared(self, other: SharedReading) -> int:
        """Returns how many tokens both begin with, by whole passes, of which both read more."""
        return _whole(_common(self.tokens[:-1], other.tokens[:-1]))

    def _place(self, shared: int) -> int:
        """The next length from `shared` on that it has not reached yet; 0 where it reads no more
        whole passes."""
        place = max(shared, self.length + PREFILL_TOKENS)
        return place if place < len(self.tokens) else 0

    def _take_over(self, target: Session) -> int | None:
        found = self.sharing.longest(self.tokens)
        if found is None or found[1] <= target.length:
            return None
        kept, length = found
        assert isinstance(target, Restorable)
        with suppress(ValueError):
            with TranslatedErrors(ValueError):
                target.restore(kept.state, len(kept.tokens))
            if self._cut(target, length) < length:
                self.sharing.cut_in_vain()
            return target.length
        return None

    def _cut(self, target: Session, length: int) -> int:
        """Rolls back to `length` tokens, all by whole passes, or to none; returns how many are
        left."""
        self.length = self.num_whole = roll_back(target, length)
        return self.length


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens both begin with."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    return int(differs[0]) if len(differs) else most


def _whole(length: int) -> int:
    return max(0, length) // PREFILL_TOKENS * PREFILL_TOKENS
