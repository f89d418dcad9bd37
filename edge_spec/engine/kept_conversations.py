"""Conversations whose place in a target's cache another one has taken: they are kept in memory, and
go on without being read again.

A kept state is the one that the conversation had, so that it goes on as if none had come between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np

from edge_spec.fitting.devices import free_bytes

MAX_BYTES = 1_000_000_000  # of all of them
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

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
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
