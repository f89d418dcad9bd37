"""Files that appear whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_spec.errors import StorageError
from edge_spec.storage.abandoned import (
    OLD_SUFFIX,
    WORK_SUFFIX,
    remove_abandoned,
    taken_away,
    try_lock,
    unlock,
)

CACHE_VARIABLE = "EDGE_SPEC_CACHE"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux: renameat2(2)
_RENAME_SWAP = 2  # macOS: renamex_np(2)


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

    Everything in it is synced before. After an error or an interrupt nothing is left; after a
    kill, a hidden directory that is never opened, which a later call removes (see `abandoned`).
    At no moment is there neither the old nor the new one, but where the system cannot swap two
    directories: there `recover` finds the old one again.

    Raises StorageError where there is no space or no place for it, or a device or a pipe is in its
    place, OSError.
    """
    final = replaceable_directory(final)
    with scratch_directory(final) as work:
        yield work
        put_directory(work, final)


def replaceable_directory(final: Path) -> Path:
    """Returns where `put_directory` may put one: what a link leads to, so that the link stays.
    Raises as `atomic_directory`."""
    if final.is_symlink():
        final = final.resolve()
    with as_storage_error(final, refusals=True):
        is_free = final.is_dir() or final.is_file() or not final.exists()
    _refuse_unless(is_free, final)
    recover(final)
    return final


def put_directory(work: Path, final: Path) -> None:
    """Syncs the directory `work`, on the same file system, and puts it in the place of `final`."""
    for path in work.rglob("*"):
        sync(path)
    sync(work)
    work.chmod(0o755)  # mkdtemp makes it private
    _put(work, final)
    sync(final.parent)


@contextmanager
def scratch_directory(final: Path) -> Iterator[Path]:
    """A new directory beside `final` for what is needed until that is made: it goes with the block.

    What a kill leaves and what is raised is as with `atomic_directory`.
    """
    with as_storage_error(final):
        with as_storage_error(final, refusals=True):
            final.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(final, cache_directory())
            work = Path(tempfile.mkdtemp(WORK_SUFFIX, f".{final.name}.", final.parent))
        lock = try_lock(work)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            unlock(lock)


@contextmanager
def atomic_file(final: Path, mode: int = 0o644) -> Iterator[Path]:
    """A new file beside `final` that takes its place when the block ends without error.

    What a kill leaves and what is raised is as with `atomic_directory`; StorageError also where a
    device, a pipe or a directory is in its place. mode: of the new file.
    """
    with as_storage_error(final):
        require_replaceable_file(final)
        with as_storage_error(final, refusals=True):
            final.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(final, cache_directory())
            handle, name = tempfile.mkstemp(WORK_SUFFIX, f".{final.name}.", final.parent)
        os.close(handle)
        work = Path(name)
        lock = try_lock(work)
        try:
            yield work
            put_file(work, final, mode)
        finally:
            work.unlink(missing_ok=True)
            unlock(lock)


def require_replaceable_file(final: Path) -> None:
    """Raises as `atomic_file` where `put_file` must not put one there."""
    with as_storage_error(final, refusals=True):
        is_free = final.is_file() or not final.exists()
    _refuse_unless(is_free, final)


def put_file(work: Path, final: Path, mode: int = 0o644) -> None:
    """Syncs the file `work`, on the same file system, and puts it in the place of `final`."""
    work.chmod(mode)  # mkstemp makes it private
    sync(work)
    work.replace(final)
    sync(final.parent)


def _refuse_unless(is_free: bool, final: Path) -> None:
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


def recover(final: Path) -> None:
    """Puts back the directory that a kill took away while another one was to take its place."""
    if os.path.lexists(final):
        return
    for old in sorted(taken_away(final), key=lambda path: path.name):
        with suppress(OSError):  # another process has put it back
            old.rename(final)
            return


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
    """Afterwards `work` is gone, or holds what was at `final`."""
    try:
        work.rename(final)
        return
    except OSError:
        if not final.exists():
            raise
    if swapped(work, final):
        return
    old = work.with_name(f"{work.name}{OLD_SUFFIX}")
    final.rename(old)
    try:
        work.rename(final)
    except BaseException:
        recover(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


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


def swapped(first: Path, second: Path) -> bool:
    """Says whether they have changed places; False if this system or file system cannot do it."""
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "linux":
            status = library.renameat2(
                _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
            )
        elif sys.platform == "darwin":
            status = library.renamex_np(os.fsencode(first), os.fsencode(second), _RENAME_SWAP)
        else:
            return False
    except (AttributeError, OSError, TypeError):  # no such function; Windows has no CDLL(None)
        return False
    return bool(status == 0)
