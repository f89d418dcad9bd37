"""Files that appear whole or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_VARIABLE = "EDGE_SPEC_CACHE"
_ABANDONED_AFTER_S = 24 * 3600.0


def cache_directory() -> Path:
    """Where downloads and converted models are kept; $EDGE_SPEC_CACHE overrides it."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("edge-spec"))


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """A new directory beside `final` that takes its place when the block ends without error.

    Every file is synced before the rename. After an error or an interrupt nothing is left; after
    a kill, a hidden directory that is never opened, which a later call for `final` removes when
    it is a day old.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield work
        for path in work.rglob("*"):
            if path.is_file():
                _sync(path)
        _sync(work)
        work.chmod(0o755)  # mkdtemp makes it private
        _put(work, final)
        _sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def atomic_file(final: Path, mode: int = 0o644) -> Iterator[Path]:
    """A new file beside `final` that takes its place when the block ends without error.

    What a kill leaves is as with `atomic_directory`. mode: of the new file.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", dir=final.parent)
    os.close(handle)
    work = Path(name)
    try:
        yield work
        work.chmod(mode)  # mkstemp makes it private
        _sync(work)
        work.replace(final)
        _sync(final.parent)
    finally:
        work.unlink(missing_ok=True)


def _put(work: Path, final: Path) -> None:
    try:
        work.rename(final)
    except OSError:
        if not final.exists():
            raise
        old = work.with_name(f"{work.name}.old")
        final.rename(old)
        try:
            work.rename(final)
        except BaseException:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(final: Path) -> None:
    before = time.time() - _ABANDONED_AFTER_S
    for path in final.parent.glob(f".{glob.escape(final.name)}.*"):
        with suppress(OSError):  # another process may be removing it
            if path.stat().st_mtime < before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
