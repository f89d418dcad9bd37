"""Keeps earlier answers, which the model may write again, in one file a model.

Opt-in, for privacy: the file holds the tokens of answers, each after the last tokens of its prompt;
the rest of a prompt is never kept. It is laid out as any index, see corpus_file.py, but read into
memory: Windows cannot replace a file that is mapped elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from os import SEEK_END
from pathlib import Path
from threading import RLock

import numpy as np

from edge_spec.drafters.lookup.corpus_file import build_index, index_of, open_index
from edge_spec.drafters.lookup.corpus_index import TOKEN_BYTES, CorpusIndex
from edge_spec.errors import EdgeSpecError, ModelFileError
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import tell_unkept
from edge_spec.storage.locks import locked
from edge_spec.text.vocabulary import Vocabulary

MAX_TOKENS = 250_000  # of all answers: 2 MB; the oldest go
MAX_UNSAVED_TOKENS = 32_768  # likewise, of those that cannot be saved
CONTEXT_TOKENS = 3  # of a prompt, before its answer
SAVE_AFTER_S = 60.0  # between two saves; what is newer than that is lost to a kill
LOCK_TIMEOUT_S = 1.0  # a save holds the lock for some tenths of a second at most

_MAX_BYTES = 2 * TOKEN_BYTES * MAX_TOKENS + (1 << 17)  # of a file; its header is shorter
_PRIVATE = 0o600  # it tells what was written

_log = logging.getLogger(__name__)


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
        self._new: list[np.ndarray] = []  # answers that are not saved, the oldest first
        # Replaced as a whole: rounds look at it without the lock, which a save holds for long.
        self._indexes: Mapping[str, CorpusIndex] = {}
        with suppress(OSError):  # the counts of tokens that versions before this one kept of them
            (path.parent.parent / "ngrams" / path.name).with_suffix(".ngrams").unlink()
        try:
            self._indexes = _named("saved", self._read())
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
            answers = _once([*self._new, np.array(answer, np.uint32)])
            self._new = _newest(answers, MAX_UNSAVED_TOKENS)
            new = _named("new", index_of(self._new, self._vocabulary))
            self._indexes = {**self._indexes, **new}

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
                saved = self._read()
                answers = _once([*(saved.documents() if saved else ()), *self._new])
                answers = _newest(answers, MAX_TOKENS)
                build_index(answers, self._vocabulary, self._path, _PRIVATE)
                self._indexes = _named("saved", self._read())
        except TimeoutError:
            self._warn(f"another process saves {self._path}; the new answers wait")
        except OSError as error:
            tell_unkept(self._path, error)  # the new answers stay in memory
        else:
            self._new.clear()
            self._warned.clear()
            return True
        return False

    def _read(self) -> CorpusIndex | None:
        """Raises OSError where the file is there but cannot be read."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, SEEK_END) > _MAX_BYTES:
                    raise ModelFileError(f"{self._path} is too large", remedy="Delete it.")
                return open_index(self._path, self._vocabulary, in_memory=True)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except EdgeSpecError as error:
            self._warn(f"earlier answers start again: {error.message}")
        return None

    def _warn(self, line: str) -> None:
        """Logs each line once, until a save succeeds."""
        if line not in self._warned:
            self._warned.add(line)
            _log.warning("%s", line)


def _named(name: str, index: CorpusIndex | None) -> dict[str, CorpusIndex]:
    return {} if index is None else {name: index}


def _once(answers: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Keeps the latest of equal answers, so that a question asked often takes no more room."""
    found: dict[bytes, np.ndarray] = {}
    for answer in answers:
        key = answer.tobytes()
        found.pop(key, None)
        found[key] = answer
    return list(found.values())


def _newest(answers: Sequence[np.ndarray], max_tokens: int) -> list[np.ndarray]:
    """The last ones of `max_tokens` in all, separators included; the end of one that is longer."""
    found: list[np.ndarray] = []
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
        return sorted((cache_directory() / "answers").glob("*.corpus"))
    return []


def forget(path: Path) -> int:
    """Removes a file, also while models are open that draft from it, which then draft no more of
    it; returns how many bytes that were. Raises OSError, TimeoutError."""
    with locked(path, LOCK_TIMEOUT_S):
        num_bytes = path.stat().st_size
        path.unlink()
    return num_bytes
