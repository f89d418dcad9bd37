"""The store of measurements: what cannot be read is not known, what cannot be written costs only
time, and neither is an error."""

from __future__ import annotations

import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from edge_spec.storage import measurements
from edge_spec.storage.measurements import Quantity, store_path


@dataclass(frozen=True)
class Key:
    model: str
    threads: int | None = None
    options: tuple[str, ...] = ()


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SECONDS = Quantity("seconds", Key, lambda: TypeAdapter(dict[int, Seconds]))
OTHER = Quantity("other", Key, lambda: TypeAdapter(dict[int, Seconds]))
COUNT = Quantity("count", str, lambda: TypeAdapter(int))
KEY = Key("m", None, ("kv_type=f16",))
VALUE = {1: 0.1, 2: 1e-300}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache?#%20ü"))
    return store_path()


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """The file as another program opens it."""
    with closing(sqlite3.connect(path, 0.0, isolation_level=None)) as opened:
        yield opened


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.builds(Key, st.text(), st.none() | st.integers(0), st.tuples(st.text())),
        st.dictionaries(st.integers(-(2**60), 2**60), st.floats(1e-300, 1e300)),
        max_size=5,
    )
)
def test_what_was_kept_is_known_and_nothing_else(found: dict[Key, dict[int, float]]) -> None:
    store_path().unlink(missing_ok=True)
    for key, value in found.items():
        OTHER.keep(key, {1: 5.0})
        SECONDS.keep(key, {1: 9.0})
        SECONDS.keep(key, value)
    assert {key: SECONDS.known(key) for key in found} == found
    assert {each.key: each.value for each in SECONDS.find()} == found
    assert all(SECONDS.known(replace(key, threads=-7)) is None for key in found)


def test_it_carries_when_how_often_and_how_disturbed_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    SECONDS.keep(KEY, VALUE, 7, 0.25)
    found = SECONDS.read(KEY)
    assert found is not None
    assert (found.key, found.value) == (KEY, VALUE)
    assert (found.n, found.disturbance, found.at) == (7, 0.25, 5000.0)
    monkeypatch.setattr(time, "time", lambda: -1.0)  # the clock was set back
    SECONDS.keep(KEY, {1: 3.0})
    found = SECONDS.read(KEY)
    assert found is not None and (found.value, found.at) == ({1: 3.0}, -1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_value_that_cannot_be_is_not_known(seconds: float) -> None:
    SECONDS.keep(KEY, VALUE)
    SECONDS.keep(Key("impossible"), {1: seconds})
    assert SECONDS.known(Key("impossible")) is None
    assert [each.key for each in SECONDS.find()] == [KEY]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("value", each) for each in ("", "{", "[]", "5", b"\xff\0", '{"1": "x"}', '{"1":9.0}')),
        *(
            ("n", "many"),
            ("n", math.inf),
            ("disturbance", "x"),
            ("at", b"yesterday"),
            ("key", b"\xff{"),
        ),
    ],
)
def test_a_row_that_another_program_changed_is_not_known(
    column: str, value: Any, path: Path
) -> None:
    for key in (KEY, Key("another")):
        SECONDS.keep(key, VALUE)
    with database(path) as opened:
        opened.execute(f"UPDATE measurement SET {column} = ? WHERE key LIKE '%kv_type%'", (value,))
    assert SECONDS.known(KEY) is None
    assert [each.key for each in SECONDS.find()] == [Key("another")]
    assert SECONDS.update(KEY, lambda old: VALUE if old is None else {}) == VALUE
    assert SECONDS.known(KEY) == VALUE


def with_sql(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with database(path) as opened:
            for each in statements:
                opened.execute(each)

    return change


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "another column": with_sql("ALTER TABLE measurement RENAME COLUMN n TO rounds"),
    "a view of endless rows": with_sql(
        "DROP TABLE measurement",
        "CREATE VIEW measurement AS WITH RECURSIVE rows(key) AS (SELECT '{}' UNION ALL SELECT key "
        "FROM rows) SELECT key, 'seconds' what, '{}' value, 1 n, 0 disturbance, 0 at FROM rows",
    ),
    "a trigger": with_sql(
        "CREATE TRIGGER t AFTER INSERT ON measurement BEGIN DELETE FROM measurement; END"
    ),
    "random bytes": lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
    "random pages after the header": lambda path: path.write_bytes(
        path.read_bytes()[:100] + random.Random(2).randbytes(20_000)
    ),
    "JSON": lambda path: path.write_text(json.dumps({"version": 1})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_of_another_version_or_damaged_is_made_again_and_one_line_says_so(
    damage: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SECONDS.keep(KEY, VALUE)
    DAMAGES[damage](path)
    before = path.read_bytes()
    assert SECONDS.known(KEY) is None and not list(SECONDS.find())
    assert path.read_bytes() == before  # reading changes nothing
    SECONDS.keep(Key("new"), VALUE)
    SECONDS.keep(KEY, {1: 2.0})
    assert (SECONDS.known(KEY), SECONDS.known(Key("new"))) == ({1: 2.0}, VALUE)
    assert len(caplog.messages) == 1 and "cannot be read" in caplog.text


def test_of_a_file_cut_anywhere_nothing_wrong_is_known_and_it_is_written_again(path: Path) -> None:
    expected = {Key(str(number)): {number + 1: 0.5} for number in range(60)}
    for key, value in expected.items():
        SECONDS.keep(key, value)
    assert {each.key: each.value for each in SECONDS.find()} == expected
    whole = path.read_bytes()
    ends = {0, 1, 16, 99, 100, 101, 511, *range(0, len(whole), 1237), len(whole) - 1}
    fewer = 0  # than was written
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        known = {each.key: each.value for each in SECONDS.find()}
        assert known.items() <= expected.items()
        assert SECONDS.known(Key("7")) in (None, {8: 0.5})
        fewer += known != expected
        SECONDS.keep(KEY, VALUE)
        assert SECONDS.known(KEY) == VALUE
    assert fewer > len(ends) / 2


def test_a_row_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    SECONDS.keep(KEY, {rows: 1.0 for rows in range(1000)})
    assert SECONDS.known(KEY) is not None
    monkeypatch.setattr(measurements, "MAX_BYTES", 5000)
    assert SECONDS.known(KEY) is None


def test_nothing_is_made_by_reading(path: Path) -> None:
    assert SECONDS.known(KEY) is None and not list(SECONDS.find())
    assert not path.parent.parent.exists()
    path.parent.mkdir(parents=True)
    path.touch()  # as while another process makes it
    assert SECONDS.known(KEY) is None and path.stat().st_size == 0


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_is_a_file_is_told_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / place))
    for _ in range(2):
        assert SECONDS.update(KEY, lambda old: VALUE) is None
        assert SECONDS.known(KEY) is None
    assert len(caplog.messages) == 1 and "cannot be saved" in caplog.text


def test_a_directory_in_its_place_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir(parents=True)
    for _ in range(2):
        SECONDS.keep(KEY, VALUE)
        assert SECONDS.known(KEY) is None
    assert len(caplog.messages) == 2  # cannot be written, cannot be read
    assert path.is_dir()


def through(monkeypatch: pytest.MonkeyPatch, old: str, new: str, *first: str) -> None:
    """Opens the file with another URI, and begins with these statements."""
    connect = sqlite3.connect

    def changed(name: str, *arguments: Any, **named: Any) -> sqlite3.Connection:
        opened = connect(name.replace(old, new), *arguments, **named)
        for each in first:
            opened.execute(each)
        return opened

    monkeypatch.setattr(sqlite3, "connect", changed)


def test_a_file_that_may_only_be_read_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SECONDS.keep(KEY, VALUE)
    through(monkeypatch, "mode=rwc", "mode=ro")
    for _ in range(2):
        assert SECONDS.update(KEY, lambda old: {1: 2.0}) is None
        assert SECONDS.known(KEY) == VALUE
    assert len(caplog.messages) == 1 and "readonly" in caplog.text


def test_on_a_full_disk_the_old_value_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SECONDS.keep(KEY, VALUE)
    with monkeypatch.context() as patch:
        through(patch, "", "", "PRAGMA max_page_count = 1")
        for _ in range(2):
            SECONDS.keep(KEY, {rows: 1.0 for rows in range(5000)})
            assert SECONDS.known(KEY) == VALUE
    assert len(caplog.messages) == 1 and "full" in caplog.text
    SECONDS.keep(KEY, {1: 2.0})
    assert SECONDS.known(KEY) == {1: 2.0}


def test_a_file_that_another_process_holds_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SECONDS.keep(KEY, VALUE)
    monkeypatch.setattr(measurements, "WRITE_WAIT_S", 0.01)
    monkeypatch.setattr(measurements, "READ_WAIT_S", 0.01)
    with database(path) as opened:
        opened.execute("BEGIN IMMEDIATE")  # is writing
        SECONDS.keep(KEY, {1: 2.0})
        assert SECONDS.known(KEY) == VALUE
        opened.execute("COMMIT")
        opened.execute("BEGIN EXCLUSIVE")  # and ends it
        assert SECONDS.known(KEY) is None
        opened.execute("COMMIT")
    assert SECONDS.known(KEY) == VALUE
    assert len(caplog.messages) == 2 and caplog.text.count("locked") == 2


def test_a_change_that_fails_leaves_the_old_value() -> None:
    SECONDS.keep(KEY, VALUE)

    def change(old: dict[int, float] | None) -> dict[int, float]:
        raise KeyError("of the caller")

    with pytest.raises(KeyError):
        SECONDS.update(KEY, change)
    assert SECONDS.known(KEY) == VALUE


def test_the_oldest_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(measurements, "MAX_KEPT", 3)
    for name in ("a", "b", "c", "a", "d"):
        COUNT.keep(name, 1)
    assert {each.key for each in COUNT.find()} == {"a", "c", "d"}


# Arguments: how often. Begins when a line comes in.
WRITER = """
import sys
from pydantic import TypeAdapter
from edge_spec.storage.measurements import Quantity
COUNT = Quantity("count", str, lambda: TypeAdapter(int))
print("ready", flush=True)
sys.stdin.readline()
for time in range(int(sys.argv[1])):
    assert COUNT.update("all", lambda old: (old or 0) + 1)
"""


@pytest.mark.parametrize("was_damaged", [False, True])
def test_processes_and_threads_that_write_at_once_lose_nothing(
    was_damaged: bool, path: Path
) -> None:
    times = 40
    if was_damaged:
        path.parent.mkdir(parents=True)
        DAMAGES["random bytes"](path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(times)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

        def write() -> None:
            for _ in range(times):
                COUNT.update("all", lambda old: (old or 0) + 1)

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert COUNT.known("all") == 4 * times


def test_a_reader_that_opened_the_damaged_file_leaves_the_next_one_its_journal(path: Path) -> None:
    SECONDS.keep(KEY, VALUE)
    DAMAGES["random bytes"](path)
    with database(path) as reader:  # has read nothing yet
        SECONDS.keep(KEY, VALUE)
        with database(path) as writer:
            writer.execute("BEGIN")
            writer.execute("UPDATE measurement SET n = 7")
            assert reader.execute("SELECT n FROM measurement").fetchall() == [(1,)]
            writer.execute("COMMIT")  # an I/O error, where its journal is gone
    found = SECONDS.read(KEY)
    assert found is not None and found.n == 7


def test_a_write_that_a_kill_cut_off_is_taken_back(path: Path, tmp_path: Path) -> None:
    """As a process leaves the file that is killed while it writes pages: with a journal."""
    for number in range(100):
        SECONDS.keep(Key(str(number)), VALUE)
    with database(path) as opened:
        opened.execute("PRAGMA cache_spill = 1")
        opened.execute("PRAGMA cache_size = 1")
        opened.execute("BEGIN")
        opened.execute("UPDATE measurement SET value = 'half written'")
        journal = path.with_name(f"{path.name}-journal")
        left = {each: each.read_bytes() for each in (path, journal)}
    for each, content in left.items():
        each.write_bytes(content)
    assert b"half written" in left[path]
    assert [each.value for each in SECONDS.find()] == [VALUE] * 100
