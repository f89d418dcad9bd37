"""Files and directories that appear whole or not at all, and locks between processes that end with
their holder."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from edge_spec.errors import StorageError

CACHE_VARIABLE = "EDGE_SPEC_CACHE"
TOLD_AFTER_S = 1.0
_WORK_SUFFIX = ".part"  # of unfinished files
_MADE = r"\.[a-z0-9_]{8}" + re.escape(_WORK_SUFFIX)  # end of tempfile's names
_ABANDONED_AFTER_S = 24 * 3600.0  # since it was last written
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_FULL = {  # remedies
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EFBIG: "Raise the limit (ulimit -f)",
}
_Found = TypeVar("_Found")

_log = logging.getLogger(__name__)


def expanded(path: Path) -> Path:
    """Expand `~`; `~name` of an unknown user stays, as in a shell."""
    with suppress(RuntimeError):
        return path.expanduser()
    return path


def cache_directory() -> Path:
    """Return where downloads and converted models are kept; $EDGE_SPEC_CACHE overrides it."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return expanded(Path(override))
    import platformdirs

    return Path(platformdirs.user_cache_dir("edge-spec"))


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield a directory next to `final` that replaces it, synced, if the block succeeds.

    A link stays and leads to the new one. A kill leaves the old or new one, or neither between two
    renames. Raises as `scratch_beside` does, and StorageError if `final` is a device or a pipe.
    """
    if final.is_symlink():
        final = final.resolve()
    _require_free(final, or_directory=True)
    with scratch_beside(final) as work:
        yield work
        for path in (*work.rglob("*"), work):
            sync(path)
        work.chmod(0o755)  # mkdtemp makes it private
        _replace(work, final)
        sync(final.parent)


def _replace(work: Path, final: Path) -> None:
    with _turns(final.parent):  # another process may also rename twice
        if not final.exists():
            work.rename(final)
            return
        with scratch_beside(final) as aside:
            old = aside / final.name
            final.rename(old)
            try:
                work.rename(final)
            except BaseException:
                old.rename(final)
                raise


@contextmanager
def _turns(directory: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(final: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a file next to `final` that replaces it if the block succeeds. mode: of the new file.
    Raises as `scratch_beside` does, and StorageError if `final` is a device, a pipe or a directory.
    """
    _require_free(final)
    with scratch_beside(final, is_file=True) as work:
        yield work
        work.chmod(mode)  # mkstemp makes it private
        sync(work)
        work.replace(final)
        sync(final.parent)


@contextmanager
def scratch_beside(final: Path, is_file: bool = False) -> Iterator[Path]:
    """Yield a scratch directory or file next to `final`, removed after the block. A kill leaves it
    under a hidden name that is never opened, and a call after a day removes it. Raises StorageError
    without space or a place for it, OSError."""
    with as_storage_error(final):
        with as_storage_error(final, refusals=True):
            final.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(final)
            names = _WORK_SUFFIX, f".{final.name}.", final.parent
            if is_file:
                handle, made = tempfile.mkstemp(*names)
                os.close(handle)
            else:
                made = tempfile.mkdtemp(*names)
        work = Path(made)
        try:
            yield work
        finally:
            if is_file:
                work.unlink(missing_ok=True)
            else:
                shutil.rmtree(work, ignore_errors=True)


def is_work(path: Path) -> bool:
    """Return whether this is an unfinished or abandoned file of ours."""
    return path.name.startswith(".") and path.suffix == _WORK_SUFFIX


def _remove_abandoned(final: Path) -> None:
    """Remove unfinished files for `final` older than a day; in the cache also those for other
    files, which may never be written again. Only our names count: `.emacs.d` is the user's."""
    name = ".*" if cache_directory() in final.parents else re.escape(final.name)
    form = re.compile(rf"\.{name}{_MADE}", re.DOTALL)
    oldest = time.time() - _ABANDONED_AFTER_S
    with suppress(OSError):  # unreadable directory
        for path in [path for path in final.parent.iterdir() if form.fullmatch(path.name)]:
            with suppress(OSError):  # another process may be removing it
                if max(each.stat().st_mtime for each in (path, *path.rglob("*"))) < oldest:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _require_free(final: Path, or_directory: bool = False) -> None:
    """Raise StorageError unless absent, a file, or a directory if allowed."""
    with as_storage_error(final, refusals=True):
        is_free = final.is_file() or (or_directory and final.is_dir()) or not final.exists()
    if not is_free:
        remedy = "Choose another place."
        raise StorageError(f"{final} is no regular file", remedy=remedy, errno=None)


def remove_oldest(files: Iterable[Path], max_bytes: int, kept: Path | None = None) -> None:
    """Remove the oldest files, except `kept`, until at most `max_bytes` are left; those that cannot
    be removed stay."""
    found = []
    for path in files:
        with suppress(OSError):  # removed by another process
            state = path.stat()
            found.append((state.st_mtime_ns, state.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left > max_bytes and path != kept:
            with suppress(OSError):
                path.unlink()
                left -= size


def sync(path: Path) -> None:
    """Make content survive a power loss; a directory's names only if its file system can."""
    is_directory = path.is_dir()
    if os.name == "nt" and is_directory:  # Windows cannot open a directory
        return
    descriptor = os.open(path, os.O_RDONLY if is_directory else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (is_directory and error.errno in _NO_SYNC):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def as_storage_error(final: Path, *, refusals: bool = False) -> Iterator[None]:
    """Raise StorageError without space to write `final`; with `refusals`, also if a file next to it
    cannot be made."""
    try:
        yield
    except (StorageError, TimeoutError):  # TimeoutError: of a lock
        raise
    except OSError as error:
        if error.errno not in _FULL and not refusals:
            raise
        remedy = _FULL.get(error.errno or 0, f"Check {final.parent}")
        elsewhere = "choose another place"
        if cache_directory() in final.parents:
            elsewhere = f"set {CACHE_VARIABLE} to a directory that has room and can be written"
        raise StorageError(
            f"{error.strerror or error}: {final}",
            remedy=f"{remedy}, or {elsewhere}.",
            errno=error.errno,
        ) from error


@contextmanager
def locked(path: Path, timeout_s: float = math.inf, what: str = "") -> Iterator[None]:
    """Hold the lock of `path` during the block: the file "NAME.lock" next to it, which stays.

    Logs one line if another process or thread holds it for longer than TOLD_AFTER_S. what: its name
    for what is written, by default `path`. A file system without locks locks nothing: files still
    appear whole, and the later writer wins. Raises TimeoutError, StorageError if the lock's file
    cannot be made.
    """
    from filelock import FileLock  # here, since it imports asyncio

    # A soft lock would be a file that outlives a kill.
    name = path.with_name(f"{path.name}.lock")
    lock = FileLock(name, fallback_to_soft=False, thread_local=False)
    told_s = min(timeout_s, TOLD_AFTER_S)
    with ExitStack() as held:
        with as_storage_error(path, refusals=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(lock.acquire(told_s))
            except TimeoutError:
                if timeout_s == told_s:
                    raise
                _log.warning("waiting for another process to write %s", what or path)
                held.enter_context(lock.acquire(timeout_s - told_s))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield


def try_hold(path: Path) -> Callable[[], None] | None:
    """Take the lock of `path`, and return what releases it, from any thread; None if it is held.
    Raises StorageError if the lock's file cannot be made."""
    held = ExitStack()
    try:
        held.enter_context(locked(path, 0.0))
    except TimeoutError:
        return None
    return held.close


def make_once(
    path: Path,
    find: Callable[[], _Found],
    make: Callable[[], None],
) -> _Found:
    """Return what `find` returns, after `make` if that is None at first. One process at a time
    makes it, however long it takes."""
    found = find()
    if found is None:
        with locked(path):
            found = find()
            if found is None:
                make()
                found = find()
    return found
