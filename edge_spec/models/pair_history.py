"""Compares how often a pair's draft tokens are accepted now with how often they were at first.

A draft that fits its target no more, say after one of the two was tuned further, costs speed and
says nothing; this does. Kept for each pair and domain in a file of the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from edge_spec.core.metrics import DraftRounds
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import KeptFile, require_sealed, tell_unkept

if TYPE_CHECKING:
    from edge_spec.models.source import Source

SETUP_ROUNDS = 400  # with a draft token, that a pair is first known by
_RECENT_ROUNDS = 400  # after which older ones count half, and so on
_MIN_ROUNDS = 100  # of late, before anything is said
_DROP = 0.05  # of the acceptance, below which nothing is said
# Prompts change, so a pair that was no use some time ago is tried again: once a day, since what
# that finds is kept in turn.
_HOLDS_S = 24 * 3600.0
_DEVIATIONS = 3.0  # between the two rates: 1 in 700 for a pair that has not changed

_Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass
class _Counts:
    """Rounds with a draft token, and those of them whose first draft token was right."""

    rounds: _Count = 0.0
    right: _Count = 0.0

    @model_validator(mode="after")
    def _check(self) -> _Counts:
        if self.right > self.rounds:
            raise ValueError("more were right than there were")
        return self

    def add(self, other: _Counts) -> None:
        self.rounds += other.rounds
        self.right += other.right


@dataclass
class _Domain:
    setup: _Counts = field(default_factory=_Counts)
    recent: _Counts = field(default_factory=_Counts)

    def add(self, counts: _Counts) -> None:
        if self.setup.rounds < SETUP_ROUNDS:
            self.setup.add(counts)
            return
        if self.recent.rounds >= 2 * _RECENT_ROUNDS:
            self.recent = _Counts(self.recent.rounds / 2, self.recent.right / 2)
        self.recent.add(counts)


@dataclass
class _File:
    version: Literal[2]  # raise it when a history means something else
    domains: dict[str, _Domain]

    @model_validator(mode="before")
    @classmethod
    def _forget_others(cls, values: Any) -> Any:
        """Begins again where easy draft tokens were still the draft's: suffix lookup has them now,
        so a draft would seem to have got worse."""
        is_older = isinstance(values, dict) and values.get("version") == 1
        return {"version": 2, "domains": {}} if is_older else values


_FILE = TypeAdapter(_File)


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
        kept = self._file.read() or _File(2, {})
        self._seen = _FILE.dump_json(kept)  # of the file, when it was last read or written
        self._domains = kept.domains
        self._unsaved: dict[str, _Counts] = {}

    def observe(self, domain: str, drafted: DraftRounds) -> None:
        """Adds the rounds of a finished generation in which the draft's tokens were verified."""
        if not drafted.rounds:
            return
        counts = _Counts(*map(float, drafted))
        with self._lock:
            self._domains.setdefault(domain, _Domain()).add(counts)
            self._unsaved.setdefault(domain, _Counts()).add(counts)

    def staleness(self, domain: str) -> str | None:
        """One line where draft tokens are accepted less often than when the pair was set up."""
        with self._lock:
            found = self._domains.get(domain)
            if found is None or min(found.setup.rounds, found.recent.rounds) < _MIN_ROUNDS:
                return None
            setup, recent = replace(found.setup), replace(found.recent)
        before, now = setup.right / setup.rounds, recent.right / recent.rounds
        mean = (setup.right + recent.right) / (setup.rounds + recent.rounds)
        deviation = math.sqrt(mean * (1 - mean) * (1 / setup.rounds + 1 / recent.rounds))
        if before - now < max(_DROP, _DEVIATIONS * deviation):
            return None
        return (
            f"the draft is right in {now:.0%} of rounds ({domain}), {before:.0%} when this pair "
            "was set up: it may no longer belong to its target"
        )

    def findings(self) -> list[str]:
        """Returns the findings of all domains."""
        found = (self.staleness(domain) for domain in sorted(self._domains))
        return [line for line in found if line is not None]

    @property
    def first_draft_tokens(self) -> tuple[int, int]:
        """Rounds that were counted, of all domains, and those whose first draft token was
        accepted."""
        with self._lock:
            counts = [each for kept in self._domains.values() for each in (kept.setup, kept.recent)]
        return round(sum(each.rounds for each in counts)), round(sum(each.right for each in counts))

    def first_acceptance(self) -> float | None:
        """Returns the share of rounds whose first draft token was accepted, of the recent ones of
        all domains where there are enough; None before enough were counted, and where the last of
        them is more than a day old."""
        if self._is_old:
            return None
        with self._lock:
            kept = list(self._domains.values())
            for counts in ([each.recent for each in kept], [each.setup for each in kept]):
                rounds = sum(each.rounds for each in counts)
                if rounds >= _MIN_ROUNDS:
                    return sum(each.right for each in counts) / rounds
        return None

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
            if not self._unsaved:
                return
            try:
                kept = self._file.update(self._joined)
            except OSError as error:
                tell_unkept(self._file.path, error)
                return
            self._seen, self._domains = _FILE.dump_json(kept), kept.domains
            self._unsaved.clear()

    def _joined(self, old: _File | None) -> _File:
        """These counts; where another process has saved its own meanwhile, those and what is new
        here, which then weighs no more than what is recent."""
        if old is None or _FILE.dump_json(old) == self._seen:
            return _File(2, self._domains)
        for domain, counts in self._unsaved.items():
            share = min(1.0, 2 * _RECENT_ROUNDS / counts.rounds)
            old.domains.setdefault(domain, _Domain()).add(
                _Counts(share * counts.rounds, share * counts.right)
            )
        return old


def check_history(path: Path) -> None:
    """Raises ModelFileError for a file that is not as `save` writes it, OSError."""
    require_sealed(path, _FILE, "history of a pair")
