"""The answers that heads are trained on, with what the target computed for them: one file each, for
the user's eyes alone, within a bound."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.distill.tensor_file import read_tensors, write_tensors
from edge_spec.storage.atomic import atomic_file

PRIVATE = 0o600
MAX_BYTES = 200_000_000  # of all texts of a model; the oldest go first
_NAME = re.compile(r"(\d{8})-(\d+)\.text")
_KEPT = np.dtype("<f2")
_LARGEST = float(np.finfo(_KEPT).max)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LearntText:
    """An answer, and the states in which the target chose its tokens.

    prompt: its tokens. tokens: [tokens] int64 of the answer. states: [tokens, hidden_size] float16
    after the target's final norm; row i is where tokens[i] was chosen.
    """

    prompt: tuple[int, ...]
    tokens: np.ndarray
    states: np.ndarray


class TextEntry(NamedTuple):
    """A text that is kept, without what is in it."""

    number: int  # texts are numbered as they come
    num_tokens: int


def as_kept(states: np.ndarray) -> np.ndarray:
    """[rows, hidden_size] as files have it."""
    kept: np.ndarray = np.clip(states, -_LARGEST, _LARGEST).astype(_KEPT)
    return kept


class TextFiles:
    """Those of one model, in a directory that others cannot read."""

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory
        self._max_bytes = max_bytes

    def entries(self) -> list[TextEntry]:
        """Returns what is kept, by number. Reads names alone."""
        with suppress(FileNotFoundError):
            found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
            return sorted(TextEntry(int(each[1]), int(each[2])) for each in found if each)
        return []

    def add(self, text: LearntText) -> None:
        """Removes the oldest ones beyond the bound. Raises StorageError where there is no space,
        OSError."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        entries = self.entries()
        number = entries[-1].number + 1 if entries else 0
        with atomic_file(self._path(TextEntry(number, len(text.tokens))), PRIVATE) as work:
            prompt = np.array(text.prompt, np.int64)
            tensors = {"prompt": prompt, "tokens": text.tokens, "states": text.states}
            write_tensors(work, tensors)
        self._remove_oldest()

    def read(self, entries: Sequence[TextEntry], target: ModelConfig) -> Iterator[LearntText]:
        """Yields each; one that is damaged, or of another target, is removed, which a warning
        says."""
        for entry in entries:
            path = self._path(entry)
            try:
                yield _checked(path, target)
            except FileNotFoundError:
                continue
            except (ValueError, KeyError) as error:
                _log.warning("%s is damaged and is left out: %s", path, error)
                with suppress(OSError):
                    path.unlink()

    def num_bytes(self) -> int:
        return sum(self._size(each) for each in self.entries())

    def _remove_oldest(self) -> None:
        entries = self.entries()
        left = sum(map(self._size, entries))
        for entry in entries[:-1]:
            if left <= self._max_bytes:
                return
            left -= self._size(entry)
            with suppress(OSError):
                self._path(entry).unlink()

    def _size(self, entry: TextEntry) -> int:
        with suppress(OSError):
            return self._path(entry).stat().st_size
        return 0

    def _path(self, entry: TextEntry) -> Path:
        return self.directory / f"{entry.number:08}-{entry.num_tokens}.text"


def _checked(path: Path, target: ModelConfig) -> LearntText:
    """Raises ValueError, KeyError for what is no text of this target."""
    tensors, _ = read_tensors(path)
    prompt, tokens, states = (tensors[name] for name in ("prompt", "tokens", "states"))
    if states.dtype != _KEPT or states.shape != (len(tokens), target.hidden_size):
        raise ValueError(f"its states have the shape {states.shape}")
    if not np.isfinite(states).all():
        raise ValueError("not all of its states are numbers")
    for each in (prompt, tokens):
        if each.dtype != np.int64 or each.ndim != 1 or not len(each):
            raise ValueError("it has no tokens")
        if each.min() < 0 or each.max() >= target.vocab_size:
            raise ValueError("it has tokens beyond the vocabulary")
    return LearntText(tuple(prompt.tolist()), tokens, states)
