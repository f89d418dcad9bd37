"""Drafts from other texts, files of the user's or earlier answers: what follows the longest end of
the text that occurs in one.

Answers, which the model may write again, are kept in one file a model. Opt-in, for privacy: it
holds the tokens of answers, each after the last tokens of its prompt; the rest of a prompt is never
kept.

SuffixDecoding (Oliaro et al. 2024) drafts by how often each token followed a match, and SAM
decoding (Hu et al. 2024) looks the text up in a corpus beside the text itself. Here the corpus is
a suffix array (corpus_index.py). The share of a match's occurrences that a token follows is no
calibrated chance: one occurrence of two tokens is always unanimous and mostly
wrong. So confidence is learnt for kinds of draft tokens that differ in the length of the match, its
occurrences and that share.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup.corpus_index import MAX_MATCH, CorpusIndex, CorpusMatch, index_of
from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.tree_builder import Candidate, LearningDrafter, grow, nothing
from edge_spec.storage.atomic import cache_directory, locked
from edge_spec.storage.measurements import (
    DamagedError,
    read_sealed,
    tell_unkept,
    write_sealed,
)
from edge_spec.text.vocabulary import Vocabulary

MAX_TOKENS = 250_000  # of all answers: below 2 MB; the oldest go
MAX_UNSAVED_TOKENS = 32_768  # likewise, of those that cannot be saved
CONTEXT_TOKENS = 3  # of a prompt, before its answer
SAVE_AFTER_S = 60.0  # between two saves; what is newer than that is lost to a kill
LOCK_TIMEOUT_S = 1.0  # a save holds the lock for some tenths of a second at most

_PRIVATE = 0o600  # it tells what was written
_SUFFIXES = (".json", ".corpus")  # the second of versions before this one, which is not read

_log = logging.getLogger(__name__)


@dataclass
class _File:
    version: Literal[1]  # raise it when answers mean something else
    vocabulary: str  # its sha256
    answers: list[list[Annotated[int, Field(ge=0)]]]


@cache
def _file() -> TypeAdapter[_File]:
    return TypeAdapter(_File)


class KeptAnswers:
    """Records the answers of one conversation for all that share a store. Use it from one thread at
    a time; others of the store may be used in other threads.

    path: the file; its directory is made where it is missing. keeps: whether anything is saved.
    clock: seconds. A file that is damaged or belongs to another vocabulary is logged once and begun
    again. Several processes may share a file.
    """

    def __init__(
        self,
        path: Path,
        vocabulary: Vocabulary,
        keeps: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = _Store(path, vocabulary, keeps, clock)
        self._answer: list[int] = []  # the one that is being written, after its context
        self._num_context = 0
        self._begun_after = 0  # times that the file was forgotten

    def beside(self) -> KeptAnswers:
        """Returns a recorder for another conversation, which drafts from the same answers."""
        other = copy(self)
        other._answer, other._num_context = [], 0
        return other

    @property
    def indexes(self) -> Sequence[CorpusIndex]:
        """Returns what was written before this answer."""
        return self._store.indexes

    def begin(self, prompt: Sequence[int]) -> None:
        """Ends the answer before, and saves where the last save is SAVE_AFTER_S ago."""
        if len(self._answer) > self._num_context:
            self._store.add(self._answer, self._begun_after)
        self._answer = list(prompt[-CONTEXT_TOKENS:])
        self._num_context = len(self._answer)
        self._store.save_in_time()
        self._begun_after = self._store.num_forgotten

    def extend(self, tokens: Sequence[int]) -> None:
        """Tells what has been written of the answer."""
        self._answer.extend(tokens)

    def close(self) -> None:
        """Ends the answer and saves; more may follow."""
        self.begin(())
        self.save()

    def save(self) -> bool:
        """Adds the answers that have ended to the file, each once; beyond MAX_TOKENS the oldest go.

        Returns False where they stay for the next time. Raises nothing: why is logged once.
        """
        return self._store.save()


class _Store:
    """The answers of a file, and those of this process, which `save` adds to the file. Any thread
    may call.

    num_forgotten: how many times the file was found to be removed.
    """

    def __init__(
        self, path: Path, vocabulary: Vocabulary, keeps: bool, clock: Callable[[], float]
    ) -> None:
        self.num_forgotten = 0
        self._path = path
        self._vocabulary = vocabulary
        self._keeps = keeps
        self._clock = clock
        self._lock = RLock()  # of all below
        self._last_save_s = clock()
        self._warned: set[str] = set()
        self._new: list[list[int]] = []  # answers that are not saved, the oldest first
        # Replaced as a whole: rounds look at it without the lock, which a save holds for long.
        self._indexes: Mapping[str, CorpusIndex] = {}
        with suppress(OSError):  # what versions before this one kept
            path.with_suffix(".corpus").unlink()
        try:
            self._indexes = self._indexed("saved", self._read())
        except OSError as error:
            self._warn(f"earlier answers are not used: cannot read {path}: {error.strerror}")

    @property
    def indexes(self) -> Sequence[CorpusIndex]:
        return tuple(self._indexes.values())

    def add(self, answer: Sequence[int], begun_after: int) -> None:
        """begun_after: `num_forgotten` when the answer began. One of before is forgotten, too."""
        with self._lock:
            self._look_for_file()
            if begun_after < self.num_forgotten:
                return
            self._new = _newest(_once([*self._new, list(answer)]), MAX_UNSAVED_TOKENS)
            self._indexes = {**self._indexes, **self._indexed("new", self._new)}

    def save_in_time(self) -> None:
        """Saves where the last save is SAVE_AFTER_S ago."""
        with self._lock:
            self._look_for_file()
            if self._new and self._clock() - self._last_save_s > SAVE_AFTER_S:
                self._save()

    def save(self) -> bool:
        with self._lock:
            self._look_for_file()
            return self._save()

    def _look_for_file(self) -> None:
        """Forgets all answers where the file was removed."""
        if "saved" in self._indexes and not self._path.exists():
            self._indexes, self._new = {}, []
            self.num_forgotten += 1

    def _save(self) -> bool:
        self._last_save_s = self._clock()  # also after a failure: not at every answer again
        if not (self._new and self._keeps):
            return not self._new
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._path, LOCK_TIMEOUT_S):
                answers = _newest(_once([*self._read(), *self._new]), MAX_TOKENS)
                kept = _File(1, self._vocabulary.sha256, answers)
                write_sealed(self._path, _file(), kept, _PRIVATE)
                self._indexes = self._indexed("saved", answers)
        except TimeoutError:
            self._warn(f"another process saves {self._path}; the new answers wait")
        except OSError as error:
            tell_unkept(self._path, error)  # the new answers stay in memory
        else:
            self._new.clear()
            self._warned.clear()
            return True
        return False

    def _read(self) -> list[list[int]]:
        """Raises OSError where the file is there but cannot be read."""
        try:
            kept = read_sealed(self._path, _file())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except DamagedError as error:
            self._warn(f"earlier answers start again: {self._path} is damaged: {error}")
            return []
        if kept.vocabulary != self._vocabulary.sha256:
            self._warn(f"earlier answers start again: {self._path} is of another tokenizer")
            return []
        return [each for each in kept.answers if each and max(each) < self._vocabulary.size]

    def _indexed(self, name: str, answers: Sequence[list[int]]) -> dict[str, CorpusIndex]:
        return {name: index_of(answers, self._vocabulary.size)} if answers else {}

    def _warn(self, line: str) -> None:
        """Logs each line once, until a save succeeds."""
        if line not in self._warned:
            self._warned.add(line)
            _log.warning("%s", line)


def _once(answers: Iterable[list[int]]) -> list[list[int]]:
    """Keeps the latest of equal answers, so that a question asked often takes no more room."""
    found: dict[tuple[int, ...], list[int]] = {}
    for answer in answers:
        key = tuple(answer)
        found.pop(key, None)
        found[key] = answer
    return list(found.values())


def _newest(answers: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """The last ones of `max_tokens` in all, separators included; the end of one that is longer."""
    found: list[list[int]] = []
    left = max_tokens
    for answer in reversed(answers):
        if len(answer) + 1 > left:
            break
        found.append(answer)
        left -= len(answer) + 1
    return found[::-1] or [answers[-1][1 - max_tokens :]]


def kept_files() -> list[Path]:
    """Returns those of all models: each is named by its model, and an identity after a hyphen."""
    with suppress(OSError):
        found = (cache_directory() / "answers").iterdir()
        return sorted(path for path in found if path.suffix in _SUFFIXES)
    return []


def check_answers(path: Path) -> None:
    """Raises DamagedError for a file that is not as `KeptAnswers` writes it, OSError."""
    read_sealed(path, _file())


def forget(path: Path) -> int:
    """Removes a file, also while models are open that draft from it, which then draft no more of
    it; returns how many bytes that were. Raises OSError, TimeoutError."""
    with locked(path, LOCK_TIMEOUT_S):
        num_bytes = path.stat().st_size
        path.unlink()
    return num_bytes


MIN_MATCH = 2  # tokens; what follows a single one is little but the language's common pairs

# A kind of draft token is one bucket of each: tokens of the match, its occurrences, and the share
# of them that the draft token follows; the least of each bucket.
_LENGTHS = (MIN_MATCH, 3, 4, 6, 9, 14)
_OCCURRENCES = (1, 2, 4, 16)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)

# log(P / (1 - P)) of a kind, before anything was seen: of its share, plus of its occurrences,
# plus of its length by what length matters for that share. Fitted to a quarter of the files of
# three collections (the standard library of Python, the sources of three packages, package
# descriptions) against an index of the other three quarters; within 0.1 of what was counted for
# kinds with 300 draft tokens or more.
_OF_SHARE = (-6.2, -5.1, -4.2, -3.2, -2.6, -1.4)
_OF_OCCURRENCES = (0.0, 1.1, 1.9, 2.8)
_OF_LENGTH = (0.0, 0.4, 1.1, 1.9, 2.3, 3.6)
_LENGTH_MATTERS = (0.1, 0.3, 0.3, 0.3, 0.6, 1.0)  # by share

# The same in several corpora: all of one length.
_Matches = tuple[tuple[CorpusIndex, CorpusMatch], ...]


class CorpusDrafter(LearningDrafter):
    """Texts count as one: the longest match decides, wherever it occurs.

    indexes: of texts that stay as they are. answers: those of before, to which what is written here
    is added.
    """

    def __init__(
        self,
        indexes: Sequence[CorpusIndex] = (),
        answers: KeptAnswers | None = None,
        name: str = "corpus",
    ) -> None:
        super().__init__(_priors())
        self.name = name
        self._texts = tuple(indexes)
        self._answers = answers
        self._text: list[int] = []  # the last MAX_MATCH tokens, the pending one included

    def begin(self, prompt: Sequence[int]) -> None:
        if self._answers is not None:
            self._answers.begin(prompt)
        self._text = list(prompt[-MAX_MATCH:])
        super().begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        found = self._longest()
        if found:
            self._growth = grow(self.name, pending, budget, self._acceptance, found, _expand)
        else:
            self._growth = nothing(pending)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._text = [*self._text, *verdict.tokens][-MAX_MATCH:]
        if self._answers is not None:
            self._answers.extend(verdict.tokens)

    def close(self) -> None:
        """Saves the answers; the drafter stays usable."""
        if self._answers is not None:
            self._answers.close()

    def _longest(self) -> _Matches:
        answers = self._answers.indexes if self._answers is not None else ()
        found = [(index, index.match(self._text)) for index in (*self._texts, *answers)]
        length = max((match.length for _, match in found), default=0)
        if length < MIN_MATCH:
            return ()
        return tuple(pair for pair in found if pair[1].length == length)


def _expand(found: _Matches) -> list[Candidate[_Matches]]:
    length = found[0][1].length
    occurrences = _num_occurrences(found)
    longer: dict[int, _Matches] = {}
    for index, match in found:
        for token, longer_match in index.following(match):
            longer[token] = (*longer.get(token, ()), (index, longer_match))
    return [
        Candidate(token, _kind(length, occurrences, _num_occurrences(matches)), matches)
        for token, matches in longer.items()
    ]


def _num_occurrences(found: _Matches) -> int:
    return sum(match.num_occurrences for _, match in found)


def _kind(length: int, occurrences: int, count: int) -> int:
    """The number of the kind: draft tokens that follow `count` occurrences of a match."""
    of_length = bisect_right(_LENGTHS, length) - 1
    of_occurrences = bisect_right(_OCCURRENCES, occurrences) - 1
    of_share = bisect_right(_SHARES, count / occurrences) - 1
    return (of_length * len(_OCCURRENCES) + of_occurrences) * len(_SHARES) + of_share


def _priors() -> list[float]:
    """P(right) of each kind, in the order of `_kind`."""
    matters = np.array(_LENGTH_MATTERS)
    logits = (
        np.array(_OF_LENGTH)[:, None, None] * matters
        + np.array(_OF_OCCURRENCES)[:, None]
        + np.array(_OF_SHARE)
    )
    priors: list[float] = (1 / (1 + np.exp(-logits))).ravel().tolist()
    return priors
