"""Opens the weights of a target, and outlives a runtime that cannot.

A library that ends the process while it opens a model cannot be caught. So a mark says that one is
being opened; where the next start finds that of a process that is no more, it first opens the model
in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from threading import Thread

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Model
from edge_spec.core.runtime_protocols import OpensBeside
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
)
from edge_spec.fitting.devices import processor
from edge_spec.fitting.memory import free_bytes
from edge_spec.loader.place import PlacedModels
from edge_spec.placement.candidates import candidate_of, described
from edge_spec.storage.atomic import cache_directory

_TRIAL_S = 300.0  # to open a model in
# Of a file that is opened beside other work: whoever refuses it meanwhile waits for a second or so.
_MOST_BYTES = 2_500_000_000
_ROOM = 2  # times such a file, that has to be free: nothing is closed before to make room for it


class TargetRefusedError(Exception):
    """The runtime cannot have the model, which shows only when its weights are read."""

    def __init__(self, error: EdgeSpecError) -> None:
        super().__init__(str(error))
        self.error = error


class TargetOpening:
    """Opens a target: a file that does not take long at once, in a thread of its own, while its
    text is made ready."""

    def __init__(self, placed: PlacedModels) -> None:
        self._placed = placed
        self._model: Model | None = None
        self._error: BaseException | None = None
        self._thread: Thread | None = None
        if _opens_beside(placed):
            run = copy_context().run
            # A command that ends by force does not wait for it (cli/start.py).
            self._thread = Thread(
                target=run, args=(self._open,), name="edge-spec-opening", daemon=True
            )
            self._thread.start()

    def take(self) -> Model:
        """Returns it open. Raises as `open_target` does."""
        if self._thread is None:
            return open_target(self._placed)
        self._thread.join()
        error, model = self._error, self._model
        self._error = self._model = None
        if error is not None:
            raise error
        assert model is not None
        return model

    def close(self) -> None:
        """Closes what nobody has taken."""
        if self._thread is not None:
            self._thread.join()
            if self._model is not None:
                self._model.close()

    def _open(self) -> None:
        try:
            self._model = open_target(self._placed)
        except BaseException as error:  # is told to whoever takes it
            self._error = error


def _opens_beside(placed: PlacedModels) -> bool:
    """Says whether there is no reason to wait with it."""
    runtime = placed.target.runtime
    if not isinstance(runtime, OpensBeside) or not runtime.opens_beside or _is_left(_mark(placed)):
        return False
    free, size = free_bytes(), placed.target.source.path.stat().st_size
    return size <= _MOST_BYTES and (free is None or free >= _ROOM * size)


def open_target(placed: PlacedModels) -> Model:
    """Raises ModelFileError for a file that has changed since a runtime was chosen for it,
    TargetRefusedError where another runtime may be asked, or else an EdgeSpecError."""
    _require_unchanged(placed)
    try:
        _try_apart(placed)
        with _marked(_mark(placed)):
            model = placed.target.open(placed.options.runtime_options)
    except (DeviceError, UnsupportedModelError, MissingDependencyError) as error:
        if placed.others is None:
            raise
        raise TargetRefusedError(error) from error
    try:
        _require_unchanged(placed)
    except BaseException:
        model.close()
        raise
    return model


def _require_unchanged(placed: PlacedModels) -> None:
    source = placed.source
    if source.path.is_file() and source.identity != placed.identity:
        raise ModelFileError(
            f"{source.path} has changed while it was opened",
            remedy="Start again once it is written.",
        )


def _mark(placed: PlacedModels) -> Path:
    name = f"{placed.target.runtime.name}-{placed.identity}"
    return cache_directory() / "opening" / name


@contextmanager
def _marked(mark: Path) -> Iterator[None]:
    """What cannot be written costs no more than the mark."""
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(os.getpid()), encoding="ascii")
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink()


def _try_apart(placed: PlacedModels) -> None:
    """Raises DeviceError where opening the model ends the process that does it."""
    if not _is_left(_mark(placed)):
        return
    runtime = placed.target.runtime.name
    place = described(placed.source.model, processor(runtime), placed.options.runtime_options)
    try:
        isolated(open_described, json.dumps(place), timeout_s=_TRIAL_S)
    except IsolatedError as error:
        raise DeviceError(
            f"{runtime} does not survive opening {placed.source.name}: {error}",
            remedy="Use another runtime, or another version of its library.",
        ) from None


def _is_left(mark: Path) -> bool:
    """Says whether the process is no more that made the mark. Never on Windows, where to ask for a
    process may end it."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(int(mark.read_text(encoding="ascii")), 0)
    except (ProcessLookupError, ValueError):
        return True
    except OSError:  # there is no mark, or the process is another user's
        return False
    return False


def open_described(place: str) -> None:
    """Opens a model in the other process. Raises an EdgeSpecError."""
    candidate = candidate_of(json.loads(place))
    candidate.prepared.open(candidate.options).close()
