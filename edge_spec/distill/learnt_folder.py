"""Keeps the answers that a head learns from while a model is idle, and that head, where nobody else
can read them.

A model's folder in the cache, `learnt/NAME-DIGEST`, holds one folder with a drawn name, which no
other one gets again: so a process that still learns from what was forgotten can tell.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.distill.arrays import load_arrays, save_arrays
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.features import Example
from edge_spec.distill.prompts import HELD_OUT
from edge_spec.storage.atomic import as_storage_error, cache_directory

DIRECTORY = "learnt"  # in the cache
MAX_BYTES = 200_000_000  # of all answers of a model; the oldest go first
LEAST_TOKENS, LEAST_ANSWERS = 1000, 4  # that are new, for a head to be trained
_MORE = 0.1  # of what the head before has learnt from: so much new text makes another one
_NAME = re.compile(r"(\d{8})-(\d+)\.npz")
_KEPT = np.dtype("<f2")
_LARGEST = float(np.finfo(_KEPT).max)
_log = logging.getLogger(__name__)


class KeptAnswer(NamedTuple):
    """An answer that is kept, without what is in it."""

    number: int  # they are numbered as they come
    num_tokens: int

    @property
    def is_held_out(self) -> bool:
        return self.number % HELD_OUT == 1


@dataclass(frozen=True)
class HeadReport:
    """until: the number of the first answer that the head has not seen. learnt_tokens: that it has
    learnt from. speedup: over plain decoding, as it is forecast."""

    until: int
    learnt_tokens: int
    speedup: float

    @property
    def pays(self) -> bool:
        return self.speedup > 1


@dataclass(frozen=True)
class LearntFolder:
    """The answers of one model and the head that has learnt from them. path: of the drawn name."""

    path: Path
    max_bytes: int = MAX_BYTES

    @property
    def head(self) -> Path:
        return self.path / "head"

    @property
    def training(self) -> Path:
        """Names the directory of an unfinished training."""
        return self.path / "training"

    @property
    def is_forgotten(self) -> bool:
        return not self._texts.is_dir()

    @property
    def _texts(self) -> Path:
        return self.path / "texts"

    def answers(self) -> list[KeptAnswer]:
        """Returns what is kept, by number. Reads names alone."""
        with suppress(FileNotFoundError):
            found = (_NAME.fullmatch(path.name) for path in self._texts.iterdir())
            return sorted(KeptAnswer(int(each[1]), int(each[2])) for each in found if each)
        return []

    def add(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        """states: [tokens, hidden_size], in which the target chose them. Removes the oldest answers
        beyond the bound. Raises FileNotFoundError where all was forgotten, StorageError where there
        is no space, OSError."""
        answers = self.answers()
        number = answers[-1].number + 1 if answers else 0
        kept = np.clip(states, -_LARGEST, _LARGEST).astype(_KEPT)
        arrays = {"prompt": np.array(prompt, np.int64), "tokens": tokens, "states": kept}
        save_arrays(self._file(KeptAnswer(number, len(tokens))), arrays, mode=0o600)
        sizes = [(each, self._file(each).stat().st_size) for each in self.answers()]
        left = sum(size for _, size in sizes)
        for each, size in sizes[:-1]:
            if left > self.max_bytes:
                self._file(each).unlink()
                left -= size

    def examples(self, answers: Sequence[KeptAnswer], target: ModelConfig) -> Iterator[Example]:
        """Yields what a training reads of each; one that is damaged, or of another target, is
        removed, which a warning says."""
        for each in answers:
            path = self._file(each)
            try:
                yield _example(load_arrays(path)[0], target, each.is_held_out)
            except FileNotFoundError:
                continue
            except (ValueError, KeyError) as error:
                _log.warning("%s is damaged and is left out: %s", path, error)
                path.unlink(missing_ok=True)

    def report(self) -> HeadReport | None:
        """Returns what was measured of the head; None where there is none that can be read."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            found = json.loads((self.head / "report.json").read_bytes())
            learnt, speedup = found["tokens"]["learnt"], found["forecast"]["speedup"]
            return HeadReport(int(found["until"]), int(learnt), float(speedup))
        return None

    def unfinished(self) -> int | None:
        """Returns the number of the first answer that an unfinished training does not see."""
        names = (path.stem.rpartition("-")[2] for path in self.training.glob("training-*.npz"))
        return next((int(name) for name in names if name.isdecimal()), None)

    def has_work(self) -> bool:
        """Returns whether a training is unfinished, or enough is new for another one."""
        answers, report = self.answers(), self.report()
        if {each.is_held_out for each in answers} != {True, False}:
            return False
        if self.unfinished() is not None:
            return True
        until, learnt = (report.until, report.learnt_tokens) if report else (0, 0)
        new = [each.num_tokens for each in answers if each.number >= until]
        return len(new) >= LEAST_ANSWERS and sum(new) >= max(LEAST_TOKENS, _MORE * learnt)

    def _file(self, answer: KeptAnswer) -> Path:
        return self._texts / f"{answer.number:08}-{answer.num_tokens}.npz"


def folder_of(name: str, *parts: str) -> Path:
    """Returns the folder of a model. parts: all that the states of its answers depend on."""
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_directory() / DIRECTORY / f"{name}-{digest}"


def kept_folders() -> list[Path]:
    """Returns the folders of all models."""
    with suppress(OSError):
        paths = sorted((cache_directory() / DIRECTORY).iterdir())
        return [path for path in paths if path.is_dir() and not path.name.startswith(".")]
    return []


def current(path: Path) -> LearntFolder | None:
    """Returns what a model's folder holds; None where there is nothing of this version."""
    return next((LearntFolder(each.parent) for each in path.glob("*/texts")), None)


def open_folder(path: Path) -> LearntFolder:
    """Returns what a model's folder holds, which is made where there is nothing of this version.
    Raises StorageError."""
    found = current(path)
    if found is None:
        found = LearntFolder(path / uuid4().hex)
        with as_storage_error(path, refusals=True):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True, mode=0o700)
            (found.path / "texts").mkdir(parents=True)
    return found


def forget(path: Path) -> int:
    """Removes a model's folder; returns how many bytes that were. Raises OSError."""
    found = num_bytes(path)
    path.rename(path.with_name(f".{path.name}-{uuid4().hex}"))
    for each in path.parent.glob(f".{path.name}-*"):  # what a kill has left of another call, too
        shutil.rmtree(each)
    return found


def num_bytes(path: Path) -> int:
    """Returns the bytes of all files in it."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def document(path: Path) -> dict[str, Any]:
    """Returns what `edge-spec learn status --json` prints of a model's folder."""
    folder = current(path) or LearntFolder(path)
    answers, report = folder.answers(), folder.report()
    return {
        "model": path.name.rpartition("-")[0],
        "path": str(path),
        "answers": len(answers),
        "answer_tokens": sum(each.num_tokens for each in answers),
        "bytes": num_bytes(path),
        "learnt_tokens": report.learnt_tokens if report else 0,
        "drafts": report is not None and report.pays,
        "gain": report.speedup if report else None,
    }


def _example(arrays: dict[str, np.ndarray], target: ModelConfig, is_held_out: bool) -> Example:
    """Raises ValueError, KeyError for what is no answer of this target."""
    prompt, tokens, states = (arrays[name] for name in ("prompt", "tokens", "states"))
    text = np.concatenate([prompt, tokens]).astype(np.int32)
    if states.shape != (len(tokens), target.hidden_size) or text.max() >= target.vocab_size:
        raise ValueError("it is of another model")
    conversation = Conversation(text, len(prompt), is_held_out)
    return Example(conversation, len(prompt) - 1, states[:, None])
