"""Counts how often a pair's draft tokens were accepted, in a file of the cache for each pair.

So the next process knows a draft that was no use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, model_validator

from edge_spec.core.metrics import DraftRounds
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import KeptFile, require_sealed, tell_unkept

if TYPE_CHECKING:
    from edge_spec.models.source import Source

MAX_ROUNDS = 800  # that older ones count for at most
_MIN_ROUNDS = 100  # before anything is said
# Prompts change, so a pair that was no use some time ago is tried again: once a day, since what
# that finds is kept in turn.
_HOLDS_S = 24 * 3600.0
_VERSION: Final = 3

_Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Counts:
    """Rounds with a draft token, and those of them whose first draft token was right."""

    version: Literal[3] = _VERSION  # raise it when a count means something else
    rounds: _Count = 0.0
    right: _Count = 0.0

    @model_validator(mode="before")
    @classmethod
    def _begin_again(cls, values: Any) -> Any:
        """Drops what an older version counted."""
        is_older = isinstance(values, dict) and values.get("version") in (1, 2)
        return {"version": _VERSION} if is_older else values

    @model_validator(mode="after")
    def _check(self) -> _Counts:
        if self.right > self.rounds:
            raise ValueError("more were right than there were")
        return self

    def joined(self, other: _Counts) -> _Counts:
        rounds, right = self.rounds + other.rounds, self.right + other.right
        share = min(1.0, MAX_ROUNDS / max(rounds, 1.0))
        return _Counts(_VERSION, share * rounds, share * right)


_FILE = TypeAdapter(_Counts)


def history_path(target: Source, draft: Source) -> Path:
    """Returns the file of this pair in the cache."""
    name = f"{target.name}-{target.identity}-{draft.name}-{draft.identity}.json"
    return cache_directory() / "pairs" / name


class PairHistory:
    """Counts rounds whose first draft token was accepted, which depends least on how many were
    made.

    path: of the file; one that is missing or damaged begins again. Any thread may use it, and of
    several processes each adds its counts to the file.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds, as the times of files have them."""
        self._clock = clock
        self._file = KeptFile(path, _FILE)
        self._lock = Lock()
        self._saved = self._file.read() or _Counts()
        self._unsaved = _Counts()

    def observe(self, drafted: DraftRounds) -> None:
        """Adds the rounds of a finished generation in which the draft's tokens were verified."""
        with self._lock:
            self._unsaved = self._unsaved.joined(_Counts(_VERSION, *map(float, drafted)))

    @property
    def first_draft_tokens(self) -> tuple[int, int]:
        """The rounds that count, and those whose first draft token was accepted."""
        with self._lock:
            counts = self._saved.joined(self._unsaved)
        return round(counts.rounds), round(counts.right)

    def first_acceptance(self) -> float | None:
        """Returns the share of rounds whose first draft token was accepted; None before enough were
        counted, and where the last of them is more than a day old."""
        rounds, right = self.first_draft_tokens
        return None if rounds < _MIN_ROUNDS or self._is_old else right / rounds

    @property
    def _is_old(self) -> bool:
        """Judges by the file's time, which no answer without the draft changes; a clock that was
        set back tells nothing."""
        try:
            written_s = self._file.path.stat().st_mtime
        except OSError:
            return False
        return not 0 <= self._clock() - written_s <= _HOLDS_S

    def save(self) -> None:
        """Raises nothing: why it failed is logged."""
        with self._lock:
            if not self._unsaved.rounds:
                return
            try:
                self._saved = self._file.update(
                    lambda old: (old or _Counts()).joined(self._unsaved)
                )
            except OSError as error:
                tell_unkept(self._file.path, error)
                return
            self._unsaved = _Counts()


def check_history(path: Path) -> None:
    """Raises ModelFileError for a file that is not as `save` writes it, OSError."""
    require_sealed(path, _FILE, "history of a pair")
