"""Counts how often a pair's draft tokens were accepted.

So the next process knows a draft that was no use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter

from edge_spec.core.metrics import DraftRounds
from edge_spec.storage.measurements import Quantity

if TYPE_CHECKING:
    from edge_spec.models.source import Source

MAX_ROUNDS = 800  # that older ones count for at most
_MIN_ROUNDS = 100  # before anything is said
# Prompts change, so a pair that was no use some time ago is tried again: once a day, since what
# that finds is kept in turn.
_HOLDS_S = 24 * 3600.0

_Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_PairKey = tuple[str, str, str, str]


@dataclass(frozen=True)
class _Counts:
    """Rounds with a draft token, and those of them whose first draft token was right."""

    rounds: _Count = 0.0
    right: _Count = 0.0

    def __post_init__(self) -> None:
        if self.right > self.rounds:
            raise ValueError("more were right than there were")

    def joined(self, other: _Counts) -> _Counts:
        rounds, right = self.rounds + other.rounds, self.right + other.right
        share = min(1.0, MAX_ROUNDS / max(rounds, 1.0))
        return _Counts(share * rounds, share * right)


_HISTORY: Quantity[_PairKey, _Counts] = Quantity(
    "history", tuple[str, str, str, str], TypeAdapter(_Counts)
)


def pair_key(target: Source, draft: Source) -> _PairKey:
    return target.name, target.identity, draft.name, draft.identity


class PairHistory:
    """Counts rounds whose first draft token was accepted, which depends least on how many were
    made. Any thread may use it, and each of several processes adds its counts.
    """

    def __init__(self, key: _PairKey, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since 1970."""
        self._key = key
        self._clock = clock
        self._lock = Lock()
        self._unsaved = _Counts()

    def observe(self, drafted: DraftRounds) -> None:
        """Adds the rounds of a finished generation in which the draft's tokens were verified."""
        with self._lock:
            self._unsaved = self._unsaved.joined(_Counts(*map(float, drafted)))

    @property
    def first_draft_tokens(self) -> tuple[int, int]:
        """The rounds that were saved and count, and those whose first draft token was accepted."""
        saved = _HISTORY.known(self._key) or _Counts()
        return round(saved.rounds), round(saved.right)

    def first_acceptance(self) -> float | None:
        """Returns the share of rounds whose first draft token was accepted; None before enough were
        saved, and where the last of them is more than a day old or of a clock that was set back."""
        saved = _HISTORY.read(self._key)
        if saved is None or saved.value.rounds < _MIN_ROUNDS:
            return None
        is_old = not 0 <= self._clock() - saved.at <= _HOLDS_S
        return None if is_old else saved.value.right / saved.value.rounds

    def save(self) -> None:
        with self._lock:
            new = self._unsaved
            if new.rounds and _HISTORY.update(
                self._key, lambda old: (old or _Counts()).joined(new)
            ):
                self._unsaved = _Counts()
