"""One process at a time; a lock ends with the process that holds it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edge_spec.storage.atomic import as_storage_error

TOLD_AFTER_S = 1.0
TURN_S = 1800.0
_HAS_NONE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

_log = logging.getLogger(__name__)


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
    lock = FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False)
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
    from filelock import FileLock

    name = path.with_name(f"{path.name}.lock")
    lock = FileLock(name, fallback_to_soft=False, thread_local=False)
    with as_storage_error(path, refusals=True), none_passed_over():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(0.0)
        except TimeoutError:
            return None
    return lock.release


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
