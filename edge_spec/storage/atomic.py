"""Files that appear whole or not at all, and are written by one process at a time: a lock ends with
the process that holds it."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from edge_spec.errors import StorageError

CACHE_VARIABLE = "EDGE_SPEC_CACHE"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_AT_FDCWD = -100
_SWAP = 2  # renameat2's RENAME_EXCHANGE on Linux, renamex_np's RENAME_SWAP on macOS
_WORK_SUFFIX = ".part"  # of what is being written
_MADE = r"\.[a-z0-9_]{8}" + re.escape(_WORK_SUFFIX)  # how tempfile ends such names
_UNLOCKED_AFTER_S = 60.0  # much longer than it takes to lock what was just made
_ABANDONED_AFTER_S = 24 * 3600.0  # where there are no locks
TOLD_AFTER_S = 1.0
TURN_S = 1800.0
_HAS_NONE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_log = logging.getLogger(__name__)


def expanded(path: Path) -> Path:
    """`~` is the home directory. `~name` of nobody here stays as it is, as in a shell."""
    with suppress(RuntimeError):
        return path.expanduser()
    return path


def cache_directory() -> Path:
    """Returns where downloads and converted models are kept; $EDGE_SPEC_CACHE overrides it."""
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
    """A new directory beside `final` that takes its place when the block ends without error.

    Everything in it is synced before. A link stays, and leads to the new one. After an error or an
    interrupt nothing is left; after a kill, a hidden directory that is never opened, which a later
    call removes. Where the system cannot swap two directories, a kill between two renames leaves
    neither the old nor the new one.

    Raises StorageError where there is no space or no place for it, or a device or a pipe is in its
    place, OSError.
    """
    if final.is_symlink():
        final = final.resolve()
    _require_free(final, final.is_dir)
    with scratch_directory(final) as work:
        yield work
        for path in (*work.rglob("*"), work):
            sync(path)
        work.chmod(0o755)  # mkdtemp makes it private
        _put(work, final)
        sync(final.parent)


@contextmanager
def scratch_directory(final: Path) -> Iterator[Path]:
    """A new directory beside `final` for what is needed until that is made: it goes with the block.

    What a kill leaves and what is raised is as with `atomic_directory`.
    """
    with _work_beside(final) as work:
        yield work


@contextmanager
def atomic_file(final: Path, mode: int = 0o644) -> Iterator[Path]:
    """A new file beside `final` that takes its place when the block ends without error.

    What a kill leaves and what is raised is as with `atomic_directory`; StorageError also where a
    device, a pipe or a directory is in its place. mode: of the new file.
    """
    _require_free(final)
    with _work_beside(final, is_file=True) as work:
        yield work
        work.chmod(mode)  # mkstemp makes it private
        sync(work)
        work.replace(final)
        sync(final.parent)


@contextmanager
def _work_beside(final: Path, is_file: bool = False) -> Iterator[Path]:
    """A new directory, or a file, that is locked and goes with the block."""
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
        lock = try_lock(work)
        try:
            yield work
        finally:
            if is_file:
                work.unlink(missing_ok=True)
            else:
                shutil.rmtree(work, ignore_errors=True)
            unlock(lock)


def _require_free(final: Path, replaces: Callable[[], bool] = lambda: False) -> None:
    """Raises StorageError for what is there but for a file, and but for what `replaces` says."""
    with as_storage_error(final, refusals=True):
        is_free = final.is_file() or replaces() or not final.exists()
    if not is_free:
        remedy = "Choose another place."
        raise StorageError(f"{final} is no regular file", remedy=remedy, errno=None)


@contextmanager
def as_storage_error(final: Path, *, refusals: bool = False) -> Iterator[None]:
    """Raises StorageError if the block writes `final` and there is no space for it; with
    `refusals`, also if it cannot make a file beside `final` for another reason."""
    try:
        yield
    except (StorageError, TimeoutError):  # the latter of a lock
        raise
    except OSError as error:
        full = _full_disk(error, final)
        if full is not None:
            raise full from error
        if not refusals:
            raise
        raise StorageError(
            f"cannot write in {final.parent}: {error.strerror or error}",
            remedy=f"Check it, or {_elsewhere(final)}.",
            errno=error.errno,
        ) from error


def is_work(path: Path) -> bool:
    """Says whether a writer here is writing it, or a kill has left it."""
    return path.name.startswith(".") and path.suffix == _WORK_SUFFIX


def _remove_abandoned(final: Path) -> None:
    """Removes what was to become `final` and is not written any more: its lock went with the
    process that held it. In the cache also what was to become another file, which may never be
    written again. Only names of ours count: `.emacs.d` is somebody's."""
    name = ".*" if cache_directory() in final.parents else re.escape(final.name)
    form = re.compile(rf"\.{name}{_MADE}", re.DOTALL)
    with suppress(OSError):  # a directory that cannot be read
        for path in [path for path in final.parent.iterdir() if form.fullmatch(path.name)]:
            with suppress(OSError):  # another process may be removing it
                if _is_abandoned(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_abandoned(path: Path) -> bool:
    age_s = time.time() - path.stat().st_mtime
    if age_s < _UNLOCKED_AFTER_S:
        return False
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


def sync(path: Path) -> None:
    """Makes what the file or directory holds survive a loss of power; a directory's names only if
    its file system syncs them."""
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


def _put(work: Path, final: Path) -> None:
    try:
        work.rename(final)
        return
    except OSError:
        if not final.exists():
            raise
    if _swapped(work, final):
        return
    old = Path(tempfile.mkdtemp(_WORK_SUFFIX, f".{final.name}.", final.parent)) / final.name
    try:
        final.rename(old)
        try:
            work.rename(final)
        except BaseException:
            old.rename(final)
            raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def _swapped(first: Path, second: Path) -> bool:
    """Says whether they have changed places; False if this system or file system cannot do it."""
    names = os.fsencode(first), os.fsencode(second)
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "linux":
            status = library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _SWAP)
        elif sys.platform == "darwin":
            status = library.renamex_np(*names, _SWAP)
        else:
            return False
    except (AttributeError, OSError, TypeError):  # no such function; Windows has no CDLL(None)
        return False
    return bool(status == 0)


def _full_disk(error: OSError, final: Path) -> StorageError | None:
    """Returns None for any other error."""
    if error.errno not in (*_FULL, errno.EFBIG):
        return None
    disk = next(path for path in final.absolute().parents if path.exists())
    free_mb = shutil.disk_usage(disk).free / 1e6
    while not os.path.ismount(disk):
        disk = disk.parent
    if error.errno == errno.EFBIG:
        what = f"{final.name} is larger than a file may be on {disk}"
        remedy = "Raise the limit (ulimit -f)"
    elif error.errno == errno.ENOSPC:
        what = f"no space left on {disk} for {final.name}"
        remedy = f"Free more than the {free_mb:.1f} MB that there are"
    else:
        what = f"no space left on {disk} for {final.name}: its owner's quota is used up"
        remedy = "Free some"
    return StorageError(what, remedy=f"{remedy}, or {_elsewhere(final)}.", errno=error.errno)


def _elsewhere(final: Path) -> str:
    if cache_directory() in final.parents:
        return f"set {CACHE_VARIABLE} to a directory that has room and can be written"
    return "choose another place"


@contextmanager
def locked(path: Path, timeout_s: float, waits: Callable[[], None] | None = None) -> Iterator[None]:
    """The block runs while no other process or thread holds the lock of `path`: that of a file
    beside it with ".lock" after its name, which stays.

    waits: called once where another one holds it for longer than TOLD_AFTER_S. Where the file
    system has no locks, nothing is locked: files appear whole all the same, and of two writers the
    later one stays. Raises TimeoutError, StorageError where the lock's file cannot be made.
    """
    from filelock import FileLock  # here: it imports asyncio

    # No soft lock instead, which is a file that outlives a kill.
    name = path.with_name(f"{path.name}.lock")
    lock = FileLock(name, fallback_to_soft=False, thread_local=False)
    told_s = timeout_s if waits is None else min(timeout_s, TOLD_AFTER_S)
    with ExitStack() as held:
        with as_storage_error(path, refusals=True), none_passed_over():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(lock.acquire(told_s))
            except TimeoutError:
                if waits is None:
                    raise
                waits()
                held.enter_context(lock.acquire(timeout_s - told_s))
        yield


def try_hold(path: Path) -> Callable[[], None] | None:
    """Takes the lock of `path`, and returns what gives it back, from any thread; None if another
    process or thread holds it. Raises StorageError if the lock's file cannot be made."""
    held = ExitStack()
    try:
        held.enter_context(locked(path, 0.0))
    except TimeoutError:
        return None
    return held.close


@contextmanager
def single_flight(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """`locked`, for what takes long and appears whole: after TURN_S the process that holds the lock
    is taken to hang, and the block runs all the same."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(path, TURN_S, waits))
        except TimeoutError:
            _log.warning("another process has not finished %s: it is done here", path)
        yield


@contextmanager
def none_passed_over() -> Iterator[None]:
    """Ends the block without the lock that it wants if the file system has none."""
    try:
        yield
    except OSError as error:
        if error.errno not in _HAS_NONE:
            raise
