"""Work of minutes that goes on where it stopped: what is finished of it is kept in the cache.

The folder of such work has a name that changes with all that decides the result, so that whoever
finds it may go on with it. It goes once the result is in its place, after an error that would come
again, and when nobody has gone on with it for a week.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from edge_spec.storage.abandoned import WORK_SUFFIX, try_lock, unlock
from edge_spec.storage.atomic import (
    as_storage_error,
    cache_directory,
    put_directory,
    put_file,
    replaceable_directory,
    require_replaceable_file,
    scratch_directory,
)

DIRECTORY = "conversions"  # in the cache
KEPT_DAYS = 7
_LOG_FILE = "log"
_PIECE_BYTES = 1 << 22
# Without any of them the same would come of it again.
_INTERRUPTS = (KeyboardInterrupt, SystemExit, OSError, MemoryError)

_log = logging.getLogger(__name__)


class Work(NamedTuple):
    """Names where a result is made: in a folder that nobody else writes in meanwhile."""

    folder: Path
    result: Path

    @property
    def log(self) -> Path:
        return self.folder / _LOG_FILE


@contextmanager
def resumable_directory(final: Path, key: str, grows: str) -> Iterator[Work]:
    """Does as `atomic_directory`; but if the block is interrupted or killed and the `StepFile` in
    it that is named `grows` has finished a step, the next block with this key finds that again.

    Nothing is kept where another process is at the same work, where the cache is on another file
    system than `final` or cannot be written, and on systems without locks of files.
    """
    final = replaceable_directory(final)
    with _folder(final, key) as folder:
        work = Work(folder, folder / "result")
        work.result.mkdir(exist_ok=True)
        for path in work.result.iterdir():
            if path.name != grows:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield work
        _put_directory(work.result, final)


@contextmanager
def resumable_file(final: Path, key: str) -> Iterator[Work]:
    """Does as `atomic_file`, and keeps as `resumable_directory` does."""
    require_replaceable_file(final)
    with _folder(final, key) as folder:
        work = Work(folder, folder / "result")
        yield work
        put_file(work.result, final)


def _put_directory(work: Path, final: Path) -> None:
    """Goes through a name beside `final`, where what a kill leaves is found and removed."""
    beside = Path(tempfile.mkdtemp(WORK_SUFFIX, f".{final.name}.", final.parent))
    beside.rmdir()
    work.rename(beside)
    try:
        put_directory(beside, final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _folder(final: Path, key: str) -> Iterator[Path]:
    taken = _take(final, key)
    if taken is None:
        with scratch_directory(final) as folder:
            yield folder
        return
    folder, lock = taken
    is_kept = False
    try:
        with as_storage_error(final):
            yield folder
    except _INTERRUPTS:
        log = folder / _LOG_FILE
        is_kept = log.is_file() and log.stat().st_size > 0
        if is_kept:
            _log.warning("what is finished is kept: the same command goes on with it")
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        unlock(lock)


def _take(final: Path, key: str) -> tuple[Path, int] | None:
    """The folder and its lock; None where nothing can be kept."""
    parent = cache_directory() / DIRECTORY
    folder = parent / f".{key}{WORK_SUFFIX}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(parent)
        _require_movable(parent, final.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = try_lock(folder)
    except OSError:
        return None
    if lock is None:
        return None
    with suppress(OSError):
        if os.path.samestat(folder.stat(), os.fstat(lock)):  # its last owner may have removed it
            os.utime(folder)
            return folder, lock
    unlock(lock)
    return None


def _require_movable(parent: Path, target: Path) -> None:
    """Raises OSError where a directory cannot be renamed from the one to the other."""
    probe = Path(tempfile.mkdtemp(WORK_SUFFIX, ".probe.", parent))
    try:
        moved = probe.rename(target / probe.name)
    except OSError:
        probe.rmdir()
        raise
    moved.rmdir()


def _remove_old(parent: Path) -> None:
    for folder in parent.glob(f".*{WORK_SUFFIX}"):
        with suppress(OSError):  # another process may be removing it
            if time.time() - folder.stat().st_mtime < KEPT_DAYS * 86400:
                continue
            lock = try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                unlock(lock)


class StepFile:
    """A file that only grows, and a log of the steps in which it does.

    A line of the log holds a seal and, as JSON, where a step ends in the file and what its writer
    has to know of it. The seal is the SHA-256 of the one before, of the file up to there and of the
    JSON: a step that is damaged, or was not written to its end, does not count, nor do those after
    it, and the file is cut there. One pass for all seals is as fast as to read the file.

    check: called before a step is logged, and may raise.
    """

    def __init__(self, path: Path, log: Path, check: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.steps: list[Any] = []  # that were found finished
        self.end = 0  # bytes
        self._check = check
        self._digest = hashlib.sha256()
        self._seal = ""
        path.touch()
        log.touch()
        self._read(log)
        self._file = path.open("r+b")
        self._file.truncate(self.end)
        self._file.seek(self.end)
        self._log = log.open("ab")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.end += memoryview(data).nbytes

    def finish(self, step: Any) -> None:
        """step: what JSON can hold; see `steps`."""
        self._check()
        self._file.flush()
        body = json.dumps([self.end, step]).encode()
        self._seal = self._sealed(body)
        self._log.write(f"{self._seal} ".encode() + body + b"\n")
        self._log.flush()

    def sha256(self) -> str:
        """Returns the digest of all that was written."""
        return self._digest.hexdigest()

    def __enter__(self) -> StepFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        self._file.close()

    def _sealed(self, body: bytes) -> str:
        parts = self._seal.encode(), self._digest.digest(), body
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def _read(self, log: Path) -> None:
        """Takes up the steps that are whole, and cuts the log after them."""
        size = self.path.stat().st_size
        num_good = 0
        with self.path.open("rb") as file, log.open("rb") as lines:
            for line in lines:
                seal, _, body = line.partition(b" ")
                end, step = _parsed(body)
                if not self.end <= end <= size:
                    break
                before = self._digest.copy()
                self._pass(file, end - self.end)
                sealed = self._sealed(body[:-1]).encode()
                if not line.endswith(b"\n") or seal != sealed:
                    self._digest = before
                    break
                self._seal, self.end = seal.decode(), end
                self.steps.append(step)
                num_good += len(line)
        os.truncate(log, num_good)

    def _pass(self, file: Any, num_bytes: int) -> None:
        while num_bytes > 0:
            piece = file.read(min(num_bytes, _PIECE_BYTES))
            if not piece:  # it is shorter by now
                return
            self._digest.update(piece)
            num_bytes -= len(piece)


def _parsed(body: bytes) -> tuple[int, Any]:
    """Returns where a step ends, -1 for a line that is none, and what was noted of it."""
    with suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, list) and len(found) == 2 and isinstance(found[0], int):
            return found[0], found[1]
    return -1, None
