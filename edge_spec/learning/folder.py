"""Keeps one model's learning, and forgets all of it."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from edge_spec.learning.texts import PRIVATE, TextFiles
from edge_spec.storage.atomic import atomic_directory, atomic_file, cache_directory
from edge_spec.storage.json_store import LOCK_S, read_sealed, write_sealed
from edge_spec.storage.locks import locked

DIRECTORY = "learnt"  # in the cache
_MOST_TRIALS = 50
_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ForgottenError(Exception):
    """Says that what is kept was removed meanwhile: nothing more of it may be written."""


@dataclass(frozen=True)
class Trial:
    """Answers that no head had seen, decoded again without a head and with each.

    first, last: numbers of the texts. without_s: what they took without a head. with_s: with each
    head, by its name. tokens_a_round: likewise, "" being without. chosen: who drafts from then on.
    """

    first: _Count
    last: _Count
    num_tokens: _Count
    without_s: _Seconds
    with_s: dict[str, _Seconds]
    tokens_a_round: dict[str, _Seconds]
    chosen: str | None

    @property
    def gain(self) -> float:
        """Returns how many times as fast as without one the best head is."""
        return self.without_s / max(min(self.with_s.values(), default=self.without_s), 1e-12)


@dataclass(frozen=True)
class LearningState:
    """Says how much of the learning of one model is done.

    candidate: the newest head, which learnt from all texts before number `learnt_until`. chosen:
    the head that drafts, if one does. spent_s: of a processor, on `day`.
    """

    version: Literal[1]  # raise it when what is kept means something else
    model: str
    learnt_until: _Count = 0
    learnt_tokens: _Count = 0
    judged_until: _Count = 0
    candidate: str | None = None
    chosen: str | None = None
    trials: tuple[Trial, ...] = ()
    # How often the chosen head's draft tokens were right, of each kind: where live use begins.
    stats: dict[str, list[float]] = field(default_factory=dict)
    day: str = ""
    spent_s: _Seconds = 0.0

    def after(self, trial: Trial) -> LearningState:
        trials = (*self.trials, trial)[-_MOST_TRIALS:]
        return replace(self, chosen=trial.chosen, judged_until=trial.last + 1, trials=trials)

    def spent_on(self, day: str) -> float:
        return self.spent_s if day == self.day else 0.0


_STATE = TypeAdapter(LearningState)


@dataclass(frozen=True)
class LearningFolder:
    """The folder of one model as one runtime computes it. Its parts: `texts/`, `heads/NAME/`,
    `training`, `state.json`, and `id`, which changes when all is forgotten."""

    path: Path
    texts: TextFiles = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TextFiles(self.path / "texts"))

    @property
    def training(self) -> Path:
        """Names the file of an unfinished training."""
        return self.path / "training"

    def head(self, name: str) -> Path:
        return self.path / "heads" / name

    @property
    def lock(self) -> Path:
        """Names the lock of the process that learns; beside the folder, so that it outlives
        forgetting."""
        return self.path.with_name(f"{self.path.name}.learns")

    def open(self) -> str:
        """Makes the folder where there is none; returns its id. Raises OSError."""
        with locked(self.path, LOCK_S):
            with suppress(OSError, UnicodeDecodeError):
                return self._id()
            _make_private(self.path)
            with atomic_file(self.path / "id", PRIVATE) as work:
                work.write_text(uuid.uuid4().hex, encoding="ascii")
            return self._id()

    @contextmanager
    def writing(self, id: str) -> Iterator[None]:
        """Keeps others from forgetting within the block. Raises ForgottenError where somebody has,
        OSError."""
        with locked(self.path, LOCK_S):
            try:
                is_same = self._id() == id
            except (OSError, UnicodeDecodeError):
                is_same = False
            if not is_same:
                raise ForgottenError(str(self.path))
            yield

    def state(self, model: str = "") -> LearningState:
        """Returns the kept state; that of a beginning where there is none. Raises DamagedError,
        OSError."""
        try:
            return read_sealed(self.path / "state.json", _STATE)
        except FileNotFoundError:
            return LearningState(1, model)

    def put_state(self, state: LearningState) -> None:
        """Heads that it does not name go. Within `writing`. Raises StorageError, OSError."""
        write_sealed(self.path / "state.json", _STATE, state)
        with suppress(FileNotFoundError):
            for path in (self.path / "heads").iterdir():
                if path.name not in (state.candidate, state.chosen):
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def new_head(self, name: str) -> Iterator[Path]:
        """A directory for its files, which takes its place when the block ends."""
        with atomic_directory(self.head(name)) as work:
            yield work
            for each in work.iterdir():
                each.chmod(PRIVATE)

    def start_again(self) -> None:
        """Removes all but the texts: what could not be read is trained and measured again. Within
        `writing`."""
        (self.path / "state.json").unlink(missing_ok=True)
        self.training.unlink(missing_ok=True)
        shutil.rmtree(self.path / "heads", ignore_errors=True)

    def forget(self) -> int:
        """Removes all; returns how many bytes that were. Raises OSError, TimeoutError."""
        with locked(self.path, LOCK_S):
            found = num_bytes(self.path)
            if self.path.exists():
                shutil.rmtree(self.path)
        return found

    def _id(self) -> str:
        return (self.path / "id").read_text(encoding="ascii")


def folder_of(name: str, *parts: str) -> LearningFolder:
    """name: of the model. parts: all that the states of its texts depend on."""
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return LearningFolder(cache_directory() / DIRECTORY / f"{name}-{digest}")


def kept_folders() -> list[LearningFolder]:
    """Returns the folders of all models."""
    with suppress(OSError):
        found = sorted((cache_directory() / DIRECTORY).iterdir())
        return [LearningFolder(path) for path in found if path.is_dir()]
    return []


def num_bytes(path: Path) -> int:
    """Returns the bytes of all files in it."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _make_private(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)
