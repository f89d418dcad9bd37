"""Keeps the unfinished work of a training, and removes it in time."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_spec.distill.conversations import ANSWERS_FILE
from edge_spec.errors import UsageError
from edge_spec.models.source import Source
from edge_spec.storage.atomic import as_storage_error, cache_directory, try_hold

DIRECTORY = "distill"  # in the cache
KEPT_DAYS = 7
_log = logging.getLogger(__name__)


@contextmanager
def work_folder(source: Source, tasks: str) -> Iterator[Path]:
    """Yields the folder of this model and these tasks, by their identity: whoever trains for both
    goes on with it.

    After an interrupt, or a disk that is full, a line says where it is. Folders that nobody has
    used for KEPT_DAYS are removed, and so is one in which nothing was finished. Raises UsageError
    where another process is at it.
    """
    parent = cache_directory() / DIRECTORY
    key = hashlib.sha256(f"{source.identity} {tasks}".encode()).hexdigest()[:16]
    folder = parent / f"{source.name}-{key}"
    release = try_hold(folder)
    if release is None:
        raise UsageError(f"another process trains from {folder}", remedy="Wait until it has ended.")
    try:
        with as_storage_error(folder, refusals=True):
            folder.mkdir(exist_ok=True)
            os.utime(folder)
        _remove_old(parent)
        yield folder
    except (KeyboardInterrupt, OSError):
        if _has_answers(folder):
            _log.warning(
                "what is finished is kept in %s for %d days: the same command goes on with it",
                folder,
                KEPT_DAYS,
            )
        raise
    finally:
        if not _has_answers(folder):
            shutil.rmtree(folder, ignore_errors=True)
        release()


def forget_training(folder: Path) -> None:
    """Keeps the answers alone, which a drafter of another kind can be trained on."""
    for path in folder.iterdir():
        if path.name != ANSWERS_FILE:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _has_answers(folder: Path) -> bool:
    with suppress(OSError):
        return (folder / ANSWERS_FILE).stat().st_size > 0
    return False


def _remove_old(parent: Path) -> None:
    """Leaves those alone that a process works in."""
    for folder in parent.iterdir():
        with suppress(OSError):  # another process may be removing it
            is_old = time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400
            release = try_hold(folder) if is_old and folder.is_dir() else None
            if release is not None:
                shutil.rmtree(folder, ignore_errors=True)
                release()
