"""Finds, by its name, what a writer left in a directory when it was killed, and removes it."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

WORK_SUFFIX, OLD_SUFFIX = ".part", ".old"  # of what is being written, and of what it replaces
_ABANDONED_AFTER_S = 24 * 3600.0
_UNLOCKED_AFTER_S = 60.0  # much longer than it takes to lock what was just made
_MADE = r"\.[a-z0-9_]{8}" + re.escape(WORK_SUFFIX)  # how tempfile's names end after the one we give


def is_work(path: Path) -> bool:
    """Says whether a writer here is writing it, or a kill has left it."""
    return path.name.startswith(".") and path.suffix == WORK_SUFFIX


def taken_away(final: Path) -> list[Path]:
    """Returns the directories that were moved away so that another one could become `final`."""
    return _named(final.parent, rf"\.{re.escape(final.name)}{_MADE}{re.escape(OLD_SUFFIX)}")


def remove_abandoned(final: Path, cache: Path) -> None:
    """Removes what was to become `final` and is not written any more; below `cache` also what was
    to become another file, which may never be written again. Only names of ours count: `.emacs.d`
    is somebody's."""
    names = rf"\.{re.escape(final.name)}{_MADE}({re.escape(OLD_SUFFIX)})?"
    if cache in final.parents:
        names += rf"|\..*{_MADE}"
    for path in _named(final.parent, names):
        with suppress(OSError):  # another process may be removing it
            if _is_abandoned(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _named(directory: Path, pattern: str) -> list[Path]:
    """Returns its paths of such names; none of a directory that cannot be read."""
    form = re.compile(pattern, re.DOTALL)
    with suppress(OSError):
        return [path for path in directory.iterdir() if form.fullmatch(path.name)]
    return []


def _is_abandoned(path: Path) -> bool:
    """Says whether nobody writes it any more: its lock went with the process that held it. If there
    are no locks, a day is taken to be long enough."""
    age_s = time.time() - path.stat().st_mtime
    if path.suffix != WORK_SUFFIX or age_s < _UNLOCKED_AFTER_S:
        return age_s > _ABANDONED_AFTER_S
    lock = try_lock(path)
    unlock(lock)
    return lock is not None or age_s > _ABANDONED_AFTER_S


def try_lock(path: Path) -> int | None:
    """Returns a descriptor that locks it until it is closed; None if it cannot be locked, or is."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
