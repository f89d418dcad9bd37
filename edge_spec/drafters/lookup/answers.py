"""Drafts from other texts: the user's files or earlier answers.

Proposes what follows the longest suffix of the text that occurs there (SuffixDecoding, Oliaro et
al. 2024; SAM decoding, Hu et al. 2024). Only if a user asks for it, answers are kept in one file
per model, each after the last few tokens of its prompt. A token's share of occurrences is not
calibrated (one occurrence is unanimous and mostly wrong), so confidence is learnt by length,
occurrences and share.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
from pydantic import TypeAdapter, ValidationError

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup.corpus_index import MAX_MATCH, CorpusIndex, CorpusMatch, index_of
from edge_spec.drafters.protocol import GREEDY, Budget
from edge_spec.drafters.tree_builder import Candidate, LearningDrafter, grow, nothing
from edge_spec.storage.atomic import atomic_file, cache_directory, locked
from edge_spec.storage.measurements import DamagedError, tell_unkept
from edge_spec.text.vocabulary import Vocabulary

MAX_TOKENS = 250_000  # of all answers, below 2 MB; the oldest are dropped
MAX_NEW_TOKENS = 32_768  # since the file was read; sorting them takes milliseconds
CONTEXT_TOKENS = 3  # of a prompt, before its answer
LOCK_TIMEOUT_S = 1.0  # a write holds the lock for some tenths of a second

_MAX_BYTES = 4_000_000
_PRIVATE = 0o600  # it holds what was written
_ANSWER = TypeAdapter(list[int])

_log = logging.getLogger(__name__)


class KeptAnswers:
    """A model's answers, in a file that processes may share. Thread-safe.

    The first line names the vocabulary; each other line is an answer, appended when it ends.
    Damaged lines are skipped. keeps: whether to save. num_forgotten: how often the file was found
    removed.
    """

    def __init__(self, path: Path, vocabulary: Vocabulary, keeps: bool = True) -> None:
        self.num_forgotten = 0
        # Replaced as a whole: rounds read it without the lock.
        self.indexes: Sequence[CorpusIndex] = ()
        self._path, self._vocabulary, self._keeps = path, vocabulary, keeps
        self._lock = Lock()  # guards everything below
        self._is_saved = False
        self._old: list[list[int]] = []  # from the file
        self._new: list[list[int]] = []  # added since
        self._first_line = json.dumps({"answers": 2, "vocabulary": vocabulary.sha256})
        self._read_file()

    def look_for_file(self) -> None:
        """Forget all answers if the file was removed."""
        with self._lock:
            if self._is_saved and not self._path.exists():
                self._is_saved, self._old, self._new, self.indexes = False, [], [], ()
                self.num_forgotten += 1

    def add(self, answer: Sequence[int], begun_after: int) -> None:
        """Keep a new answer. begun_after: `num_forgotten` when it began; it is dropped if that
        changed. An unsaved answer drafts until this process ends."""
        self.look_for_file()
        with self._lock:
            new = list(answer)[-MAX_NEW_TOKENS:]
            if begun_after < self.num_forgotten or new in self._old or new in self._new:
                return
            self._new.append(new)
            is_saved = self._keeps and self._append(new)
            if sum(map(len, self._new)) <= MAX_NEW_TOKENS:
                self._index()
            elif is_saved:
                self._read_file()
            else:
                self._new = _newest(self._new, MAX_NEW_TOKENS)
                self._index()

    def _read_file(self) -> None:
        """Load the file, dropping the oldest answers if there are too many."""
        self._old, self._new = [], []
        try:
            found = self._answers()
            self._old = _newest(found, MAX_TOKENS)
            if len(self._old) < len(found):
                with locked(self._path, LOCK_TIMEOUT_S), atomic_file(self._path, _PRIVATE) as work:
                    work.write_text("\n".join([self._first_line, *map(str, self._old)]))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except DamagedError as error:
            _log.warning("earlier answers start again: %s: %s", self._path, error)
            with suppress(OSError):
                self._path.unlink()
        except OSError as error:
            reason = error.strerror
            _log.warning("earlier answers are not used: cannot read %s: %s", self._path, reason)
        self._is_saved = bool(self._old)
        self._index()

    def _answers(self) -> list[list[int]]:
        """Return the file's answers without damaged lines. Raises DamagedError, OSError."""
        with self._path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise DamagedError(f"it has more than {_MAX_BYTES:,} bytes")
        first_line, *lines = raw.decode(errors="replace").split("\n")
        if first_line != self._first_line:
            raise DamagedError("it holds no answers in the tokens of this model")
        found = []
        for line in lines:
            with suppress(ValidationError):
                answer = _ANSWER.validate_json(line)
                if answer and 0 <= min(answer) <= max(answer) < self._vocabulary.size:
                    found.append(answer)
        return found

    def _append(self, answer: Sequence[int]) -> bool:
        """Return True if the answer was saved. A failure is logged once."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
            with locked(self._path, LOCK_TIMEOUT_S):
                file = os.open(self._path, flags, _PRIVATE)
                try:
                    size = os.fstat(file).st_size
                    line = f"\n{list(answer)}" if size else f"{self._first_line}\n{list(answer)}"
                    if os.write(file, line.encode()) < len(line):
                        os.ftruncate(file, size)
                        if not size:
                            self._path.unlink()
                        raise OSError("it was not written whole")
                finally:
                    os.close(file)
        except OSError as error:  # including TimeoutError
            tell_unkept(self._path, error)
            return False
        self._is_saved = True
        return True

    def _index(self) -> None:
        kept = (self._old, self._new)
        self.indexes = [index_of(each, self._vocabulary.size) for each in kept if each]


def _newest(answers: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the last answers, up to `max_tokens` tokens with separators."""
    found: list[list[int]] = []
    left = max_tokens
    for answer in reversed(answers):
        left -= len(answer) + 1
        if left < 0:
            break
        found.append(answer)
    return found[::-1]


def kept_files() -> list[Path]:
    """Return all models' files, named by model, hyphen and identity."""
    return sorted((cache_directory() / "answers").glob("*.json"))


def forget(path: Path) -> int:
    """Remove a file, whose answers open models then stop using; return its size. Raises OSError,
    TimeoutError."""
    with locked(path, LOCK_TIMEOUT_S):
        num_bytes = path.stat().st_size
        path.unlink()
    return num_bytes


MIN_MATCH = 2  # tokens; after a single one come only the language's common pairs

# Kinds of draft token: by the match's tokens, its occurrences, and the share followed by the draft
# token; lower bounds.
_LENGTHS = (MIN_MATCH, 3, 4, 6, 9, 14)
_OCCURRENCES = (1, 2, 4, 16)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)

# Prior log(P / (1 - P)): of the share, plus of the occurrences, plus of the length times how much
# length matters for that share. Fitted to a quarter of the files of three collections (Python's
# standard library, sources of three packages, package descriptions) against an index of the rest;
# within 0.1 of the counts for kinds with 300 draft tokens or more.
_OF_SHARE = (-6.2, -5.1, -4.2, -3.2, -2.6, -1.4)
_OF_OCCURRENCES = (0.0, 1.1, 1.9, 2.8)
_OF_LENGTH = (0.0, 0.4, 1.1, 1.9, 2.3, 3.6)
_LENGTH_MATTERS = (0.1, 0.3, 0.3, 0.3, 0.6, 1.0)  # by share

# Equally long matches in several corpora.
_Matches = tuple[tuple[CorpusIndex, CorpusMatch], ...]


class CorpusDrafter(LearningDrafter):
    """Drafts from texts as if they were one: the longest match wins, wherever it occurs."""

    name = "corpus"

    def __init__(self, indexes: Sequence[CorpusIndex] = ()) -> None:
        super().__init__(_priors())
        self._indexes = indexes
        self._text: list[int] = []  # the last MAX_MATCH tokens, including the pending one

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._text = list(prompt[-MAX_MATCH:])
        super().begin(prompt, sampler)

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

    def _longest(self) -> _Matches:
        found = [(index, index.match(self._text)) for index in self._indexes]
        length = max((match.length for _, match in found), default=0)
        if length < MIN_MATCH:
            return ()
        return tuple(pair for pair in found if pair[1].length == length)


class AnswersDrafter(CorpusDrafter):
    """Drafts from earlier answers, and adds its own conversation's when they end."""

    name = "answers"

    def __init__(self, answers: KeptAnswers) -> None:
        super().__init__()
        self._answers = answers
        self._answer: list[int] = []  # the current one, after its context
        self._num_context = 0
        self._begun_after = 0  # `num_forgotten` when it began

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._end_answer(prompt[-CONTEXT_TOKENS:])
        super().begin(prompt, sampler)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._answer.extend(verdict.tokens)

    def close(self) -> None:
        self._end_answer(())

    def _end_answer(self, context: Sequence[int]) -> None:
        if len(self._answer) > self._num_context:
            self._answers.add(self._answer, self._begun_after)
        self._answer, self._num_context = list(context), len(context)
        self._answers.look_for_file()
        self._begun_after = self._answers.num_forgotten
        self._indexes = self._answers.indexes


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
    """Return the kind of a token that follows `count` occurrences of a match."""
    of_length = bisect_right(_LENGTHS, length) - 1
    of_occurrences = bisect_right(_OCCURRENCES, occurrences) - 1
    of_share = bisect_right(_SHARES, count / occurrences) - 1
    return (of_length * len(_OCCURRENCES) + of_occurrences) * len(_SHARES) + of_share


def _priors() -> list[float]:
    matters = np.array(_LENGTH_MATTERS)
    logits = (
        np.array(_OF_LENGTH)[:, None, None] * matters
        + np.array(_OF_OCCURRENCES)[:, None]
        + np.array(_OF_SHARE)
    )
    priors: list[float] = (1 / (1 + np.exp(-logits))).ravel().tolist()
    return priors
