"""Measurements in one SQLite file of the cache, keyed by all that their values depend on.

A missing, damaged or out-of-bounds value, or one of another table version, is unknown; a failed
write costs only time. So reads and writes never raise: one log line reports a problem with the
file, and the next write recreates it. A value that changes its meaning needs a new name.

Each call opens the file anew, in a fraction of a millisecond, so threads, forks and a deleted cache
need no care.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from edge_spec.storage.atomic import cache_directory, locked, sha256_file

DIRECTORY, FILE = "measurements", "measurements.sqlite"
MAX_BYTES = 4_000_000  # of a value
LARGE_BYTES = 16_000_000  # smaller files are hashed faster than looked up
MAX_KEPT = 2000  # values; the oldest are removed
# Seconds to wait for another writer; a start reads several values.
WRITE_WAIT_S, READ_WAIT_S = 5.0, 1.0

# WITHOUT ROWID: a separate index could lead to wrong rows in a half-written file.
_TABLE = (
    "measurement (what TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, "
    "n INTEGER NOT NULL, disturbance REAL NOT NULL, at REAL NOT NULL, sha256 TEXT NOT NULL, "
    "PRIMARY KEY (what, key)) "
    "WITHOUT ROWID"
)
_TABLES = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
_FIND = "SELECT key, value, n, disturbance, at, sha256 FROM measurement WHERE what = ?"
_READ = f"{_FIND} AND key = ?"
_WRITE = "INSERT OR REPLACE INTO measurement VALUES (?, ?, ?, ?, ?, ?, ?)"
_PRUNE = (
    "DELETE FROM measurement WHERE (what, key) IN "
    "(SELECT what, key FROM measurement ORDER BY at DESC LIMIT -1 OFFSET ?)"
)
_NO_DATABASE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SETTLED_NS = 2_000_000_000  # the coarsest file system clock (FAT's) ticks every 2 s

_log = logging.getLogger(__name__)
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class DamagedError(ValueError):
    """Describes on one line what is wrong with a file."""


@dataclass(frozen=True)
class Measurement(Generic[_Key, _Value]):
    """A stored value. n: number of measurements. disturbance: largest relative difference between
    runs. at: time of writing, in seconds since 1970."""

    key: _Key
    value: _Value
    n: int
    disturbance: float
    at: float


@dataclass(frozen=True)
class Quantity(Generic[_Key, _Value]):
    """One kind of measurement. what: its name in the file. keys: type of keys, with all that values
    depend on. values: makes the validator at first use, since that takes tens of milliseconds."""

    what: str
    keys: type[_Key]
    values: Callable[[], TypeAdapter[_Value]]

    def read(self, key: _Key) -> Measurement[_Key, _Value] | None:
        return next(self._parse(_select(_READ, self.what, _text(key))), None)

    def known(self, key: _Key) -> _Value | None:
        found = self.read(key)
        return None if found is None else found.value

    def find(self) -> Iterator[Measurement[_Key, _Value]]:
        return self._parse(_select(_FIND, self.what))

    def keep(self, key: _Key, value: _Value, n: int = 1, disturbance: float = 0.0) -> None:
        self.update(key, lambda old: value, n, disturbance)

    def update(
        self,
        key: _Key,
        change: Callable[[_Value | None], _Value],
        n: int = 1,
        disturbance: float = 0.0,
    ) -> _Value | None:
        """Replace this key's value by `change`'s result, locking out other writers, and return it;
        None if it cannot be written."""
        path, name = store_path(), _text(key)

        def write() -> _Value:
            with _opened(path, makes=True) as store:
                store.execute("BEGIN IMMEDIATE")
                rows = store.execute(_READ, (self.what, name)).fetchall()
                old = next(self._parse(rows), None)
                value = change(None if old is None else old.value)
                content = self._values.dump_json(value).decode()
                seal = self._seal(name.encode(), content.encode())
                row = self.what, name, content, n, disturbance, time.time(), seal
                store.execute(_WRITE, row)
                store.execute(_PRUNE, (MAX_KEPT,))
                store.execute("COMMIT")
            return value

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return write()
            except DamagedError:
                with locked(path, WRITE_WAIT_S):
                    return _write_again(path, write)
        except (OSError, sqlite3.Error, DamagedError) as error:
            tell_unkept(path, error)
            return None

    def _parse(self, rows: list[tuple[Any, ...]]) -> Iterator[Measurement[_Key, _Value]]:
        """Yield readable rows, without those whose bits changed on disk: losslessness depends on
        some values."""
        for key, value, n, disturbance, at, seal in rows:
            with suppress(ValueError, TypeError, OverflowError):
                if seal != self._seal(key, value).encode():
                    continue
                yield Measurement(
                    self._keys.validate_json(key),
                    self._values.validate_json(value),
                    int(n),
                    float(disturbance),
                    float(at),
                )

    def _seal(self, key: bytes, value: bytes) -> str:
        return hashlib.sha256(b"\0".join((self.what.encode(), key, value))).hexdigest()

    @cached_property
    def _values(self) -> TypeAdapter[_Value]:
        return self.values()

    @cached_property
    def _keys(self) -> TypeAdapter[_Key]:
        return TypeAdapter(self.keys)


def store_path() -> Path:
    """Return the path of the file with all measurements."""
    return cache_directory() / DIRECTORY / FILE


def _text(key: Any) -> str:
    return json.dumps(key, default=asdict, sort_keys=True)


def _select(query: str, *values: str) -> list[tuple[Any, ...]]:
    """Return the rows, or none if the file cannot be read."""
    path = store_path()
    try:
        if path.stat().st_size:  # empty while another process creates it
            with _opened(path) as store:
                return store.execute(query, values).fetchall()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, sqlite3.Error, DamagedError) as error:
        _tell_unread(path, str(error))
    return []


@contextmanager
def _opened(path: Path, makes: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the file; uncommitted changes are dropped. makes: create a missing table. Raises
    DamagedError unless it is a database with exactly this table, sqlite3.Error."""
    mode, wait_s = ("rwc", WRITE_WAIT_S) if makes else ("rw", READ_WAIT_S)
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        with closing(sqlite3.connect(uri, wait_s, isolation_level=None, uri=True)) as store:
            store.text_factory = bytes  # other programs may have written invalid UTF-8
            store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
            if makes and not store.execute(_TABLES).fetchall():
                store.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
            # Exact, so a table of another version, a view or a trigger is not read.
            if store.execute(_TABLES).fetchall() != [(f"CREATE TABLE {_TABLE}".encode(),)]:
                raise DamagedError("it has other tables")
            yield store
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_DATABASE:
            raise DamagedError(str(error)) from None
        raise


def _write_again(path: Path, write: Callable[[], _Value]) -> _Value:
    """Write, after emptying a file that is still damaged.

    The file itself stays. A process that has a removed file open would take the new file's journal
    for its own, and remove what another is about to commit (https://sqlite.org/howtocorrupt.html,
    2.4). SQLite removes the journal of an empty file.
    """
    try:
        return write()
    except DamagedError as error:
        _tell_unread(path, str(error))
        os.truncate(path, 0)
        return write()


@cache
def _tell_unread(path: Path, reason: str) -> None:
    _log.warning("%s cannot be read, so what it knows is measured again: %s", path, reason)


def tell_unkept(path: Path, error: Exception) -> None:
    """Log that `path` cannot be saved, once for each reason in the cache."""
    root = cache_directory()
    number = getattr(error, "errno", None)
    reason = str(error) if number is None else os.strerror(number)
    _tell_once(root if root in path.parents else path, reason)


@cache
def _tell_once(where: Path, reason: str) -> None:
    _log.warning("what is learnt cannot be saved in %s: %s", where, reason)


class _State(NamedTuple):
    """A file's state; its hash is valid while this stays the same."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int
    modified_ns: int


_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_DIGEST: Quantity[_State, str] = Quantity("sha256", _State, lambda: TypeAdapter(_Sha256))


def known_sha256(path: Path) -> str:
    """Return a file's sha256 without rehashing a large unchanged one: a model of 8 billion
    parameters takes seconds each time. Raises OSError."""
    before = _state(path)
    if before.num_bytes < LARGE_BYTES:
        return sha256_file(path)
    known = _DIGEST.known(before)
    if known is not None:
        return known
    # As in git's index, a file that changed moments ago is not kept: it may change again within the
    # clock tick.
    hashed_ns = time.time_ns()
    digest = sha256_file(path)
    is_settled = max(before.changed_ns, before.modified_ns) + _SETTLED_NS < hashed_ns
    if is_settled and _state(path) == before:
        _DIGEST.keep(before, digest)
    return digest


def _state(path: Path) -> _State:
    found = path.stat()
    return _State(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns)
