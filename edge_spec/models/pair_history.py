"""Counts how often a pair's draft tokens were accepted.

So the next process knows a draft that was no use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
PairKey = tuple[str, str, str, str]


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


_HISTORY: Quantity[PairKey, _Counts] = Quantity(
    "history", tuple[str, str, str, str], lambda: TypeAdapter(_Counts)
)


def pair_key(target: Source, draft: Source) -> PairKey:
    return target.name, target.identity, draft.name, draft.identity


def add_rounds(key: PairKey, drafted: DraftRounds) -> None:
    """Count rounds in which the draft's tokens were verified."""
    new = _Counts(*map(float, drafted))
    if new.rounds:
        _HISTORY.update(key, lambda old: (old or _Counts()).joined(new))


def counted_rounds(key: PairKey) -> tuple[int, int]:
    """Return the rounds that count, and those whose first draft token was accepted."""
    found = _HISTORY.known(key) or _Counts()
    return round(found.rounds), round(found.right)


def first_acceptance(key: PairKey, clock: Callable[[], float] = time.time) -> float | None:
    """Return the share of rounds whose first draft token was accepted, which depends least on how
    many were made. None before enough were counted, and where the last of them is more than a day
    old or of a clock that was set back. clock: seconds since 1970."""
    found = _HISTORY.read(key)
    if found is None or found.value.rounds < _MIN_ROUNDS:
        return None
    is_old = not 0 <= clock() - found.at <= _HOLDS_S
    return None if is_old else found.value.right / found.value.rounds
