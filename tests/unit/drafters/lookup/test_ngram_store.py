"""Counts of n-grams on disk: against a plain table, after damage, and between two processes."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.lookup import ngram_store
from edge_spec.drafters.lookup.ngram_file import pack
from edge_spec.drafters.lookup.ngram_store import Followers, NgramStore
from edge_spec.errors import UsageError
from edge_spec.storage import json_store as kept_file
from edge_spec.storage.atomic import atomic_file

VOCAB = 50
MOST = 2**32 - 1  # what a count can hold
ALL = 10**6
Pair = tuple[tuple[int, ...], int]

CONTEXTS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1), (2, 0, 1))
additions = st.tuples(st.sampled_from(CONTEXTS), st.integers(0, 7), st.integers(1, 3))
# Additions are four times as frequent as saves.
steps = st.lists(
    st.one_of(*[additions] * 4, st.sampled_from(["save", "save", "reopen"])),
    min_size=10,
    max_size=60,
)


def open_store(path: Path, **options: Any) -> NgramStore:
    return NgramStore(path, "test-vocabulary", VOCAB, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ngrams" / "model.ngrams"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The lines that the store logs, as they come."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logs = [logging.getLogger(module.__name__) for module in (ngram_store, kept_file)]
    for log in logs:
        log.addHandler(handler)
    yield lines
    for log in logs:
        log.removeHandler(handler)


class Table:
    """The same in plain Python: of each n-gram, the count and the save that last added to it."""

    def __init__(self, max_records: int) -> None:
        self.max_records = max_records
        self.saved: dict[Pair, tuple[int, int]] = {}
        self.added: dict[Pair, int] = {}
        self.clock = 0

    def add(self, context: tuple[int, ...], token: int, count: int) -> None:
        if (context, token) in self.added or len(self.added) < self.max_records:
            self.added[context, token] = self.added.get((context, token), 0) + count

    def save(self) -> None:
        if not self.added:
            return
        self.clock += 1
        for pair, count in self.added.items():
            self.saved[pair] = min(self.saved.get(pair, (0, 0))[0] + count, MOST), self.clock
        self.added = {}

        def rank(pair: Pair) -> tuple[int, int, int, int]:
            count, used = self.saved[pair]
            return used, count, pack(pair[0]), pair[1]

        for pair in sorted(self.saved, key=rank)[: max(len(self.saved) - self.max_records, 0)]:
            del self.saved[pair]

    def lookup(self, context: tuple[int, ...], limit: int) -> Followers:
        found: dict[int, int] = {}
        for (known, token), (count, _) in self.saved.items():
            if known == context:
                found[token] = count
        for (known, token), count in self.added.items():
            if known == context:
                found[token] = found.get(token, 0) + count
        best = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]
        return Followers(sum(found.values()), best)


@given(steps=steps, max_records=st.integers(1, 25), limit=st.integers(1, 6))
def test_the_store_is_a_table_of_counts(steps: list[Any], max_records: int, limit: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ngrams"
        store, table = open_store(path, max_records=max_records), Table(max_records)
        for step in [*steps, "save", "reopen"]:
            if step == "save":
                assert store.save()
                table.save()
            elif step == "reopen":
                store = open_store(path, max_records=max_records)
                table.added.clear()
            else:
                store.add(*step)
                table.add(*step)
            assert store.num_unsaved == len(table.added)
            for context in CONTEXTS:
                assert store.lookup(context, limit) == table.lookup(context, limit)


@pytest.mark.parametrize("max_records", [10_000, 1500])
def test_many_records(path: Path, max_records: int) -> None:
    rng = np.random.default_rng(5)
    table = Table(max_records)
    for _ in range(4):
        store = open_store(path, max_records=max_records)
        for first, last, token in rng.integers(0, [40, 12, 10], (2000, 3)).tolist():
            for context in ((last,), (first, last)):
                store.add(context, token)
                table.add(context, token, 1)
        assert store.save()
        table.save()
    for opened in (store, open_store(path)):
        for known in {*(known for known, _ in table.saved), (39, 11)}:
            assert opened.lookup(known, 5) == table.lookup(known, 5)
    records = open_store(path)._saved.records
    assert len(records.tokens) == len(table.saved)
    order = np.lexsort((records.tokens, -records.counts.astype(np.int64), records.contexts))
    assert (order == np.arange(len(order))).all()


@given(
    st.sets(
        st.lists(st.sampled_from([0, 1, 2**20, 2**21 - 2]), min_size=1, max_size=3).map(tuple),
        min_size=2,
    )
)
def test_no_two_contexts_share_a_key(contexts: set[tuple[int, ...]]) -> None:
    keys = {pack(context) for context in contexts}
    assert len(keys) == len(contexts)
    assert all(0 <= key < 2**63 - 1 for key in keys)


@pytest.mark.parametrize("vocab_size", [2**21 - 1, 2**21, 10**9])
def test_a_vocabulary_that_does_not_fit_the_keys_is_refused(path: Path, vocab_size: int) -> None:
    with pytest.raises(UsageError, match=f"vocabulary of {vocab_size} tokens"):
        NgramStore(path, "v", vocab_size)


def test_the_largest_vocabulary_is_kept_exactly(path: Path) -> None:
    last = 2**21 - 3
    contexts: list[tuple[int, ...]] = [
        (last,),
        (last, last),
        (last, last, last),
        (0, 0, 0),
        (0, 0),
        (0,),
    ]
    for context in contexts:
        store = NgramStore(path, "v", last + 1)
        store.add(context, last, 1 + pack(context) % 7)
        assert store.save()
        store = NgramStore(path, "v", last + 1)
        assert store.lookup(context, 9).best == [(last, 1 + pack(context) % 7)]


def test_counts_saturate(path: Path) -> None:
    store = open_store(path)
    store.add((1,), 2, MOST - 1)
    store.add((1,), 3, 5 * MOST)
    store.save()
    assert store.lookup((1,), 2).best == [(3, MOST), (2, MOST - 1)]
    for _ in range(2):
        store.add((1,), 2)
        store.save()
    assert open_store(path).lookup((1,), 2) == (2 * MOST, [(2, MOST), (3, MOST)])


def test_a_missing_file_is_an_empty_store_and_nothing_new_is_not_written(
    path: Path, warnings: list[str]
) -> None:
    store = open_store(path)
    assert store.lookup((1,), 4) == (0, [])
    assert store.save()
    assert not path.parent.exists() and not warnings


def test_the_file_is_private(path: Path) -> None:
    save_one(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_context_used_again_outlives_a_more_frequent_one(path: Path) -> None:
    store = open_store(path, max_records=2)
    store.add((1,), 1)
    store.add((2,), 2, 100)
    store.save()
    store.add((1,), 1)
    store.save()
    for _ in range(3):
        store.lookup((2,), 4)  # asking is not using
    store.add((3,), 3)
    store.save()
    assert [store.lookup((i,), 4).total for i in (1, 2, 3)] == [2, 0, 1]


# Damage


def save_one(path: Path) -> None:
    store = open_store(path)
    store.add((1, 2), 3, 7)
    store.add((1,), 3)
    assert store.save()


def assert_starts_anew(path: Path, warnings: list[str], why: str) -> None:
    """One line, an empty store, and a save that makes the file good again."""
    store = open_store(path)
    assert store.lookup((1, 2), 4) == (0, [])
    store.add((1, 2), 4)
    assert store.save()
    assert store.lookup((1, 2), 4) == open_store(path).lookup((1, 2), 4) == (1, [(4, 1)])
    assert len(warnings) == 1
    assert str(path) in warnings[0] and "starts again" in warnings[0] and why in warnings[0]


def sealed(content: bytes, magic: bytes = b"ESNGRAM\n") -> bytes:
    return magic + hashlib.sha256(content).digest() + content


# Ends of magic, checksum, fields (version, clock, records, vocabulary) and columns, and beyond.
FIELDS, DATA = 40, 88


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8, 20, 39, 40, 43, 44, 47, 48, 56, 87, 88, 104, 112, 120, 127]
)
def test_a_truncated_file_starts_anew(path: Path, warnings: list[str], length: int) -> None:
    save_one(path)
    whole = path.read_bytes()
    assert len(whole) == 128
    path.write_bytes(whole[:length])
    assert_starts_anew(path, warnings, "")


@pytest.mark.parametrize("place", range(0, 128, 5))
def test_a_flipped_bit_starts_anew(path: Path, warnings: list[str], place: int) -> None:
    save_one(path)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1 << place % 8
    path.write_bytes(damaged)
    assert_starts_anew(path, warnings, "")


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (FIELDS, 2, "version 2, not 1"),
        (FIELDS + 8, 3, "corrupt"),  # one record more than there are
        (FIELDS + 8, 1, "corrupt"),
        (FIELDS + 15, 255, "corrupt"),  # more than any memory holds
        (FIELDS + 16, 0, "another vocabulary"),
        (DATA + 16, VOCAB, "outside the vocabulary"),
        (DATA + 19, 255, "outside the vocabulary"),  # a negative token
    ],
)
def test_a_file_that_lies_starts_anew(
    path: Path, warnings: list[str], place: int, value: int, why: str
) -> None:
    # With a right checksum: not an accident of the disk.
    save_one(path)
    content = bytearray(path.read_bytes()[FIELDS:])
    assert content[place - FIELDS] != value
    content[place - FIELDS] = value
    path.write_bytes(sealed(bytes(content)))
    assert_starts_anew(path, warnings, why)


def test_a_file_of_another_kind_starts_anew(path: Path, warnings: list[str]) -> None:
    save_one(path)
    path.write_bytes(sealed(path.read_bytes()[FIELDS:], b"ESNGRAM1"))
    assert_starts_anew(path, warnings, "not an n-gram cache")


def test_a_file_with_more_at_its_end_starts_anew(path: Path, warnings: list[str]) -> None:
    save_one(path)
    path.write_bytes(sealed(path.read_bytes()[FIELDS:] + bytes(20)))
    assert_starts_anew(path, warnings, "corrupt")


@pytest.mark.parametrize(("name", "size"), [("other", VOCAB), ("test-vocabulary", VOCAB + 1)])
def test_a_file_of_another_vocabulary_starts_anew(
    path: Path, warnings: list[str], name: str, size: int
) -> None:
    store = NgramStore(path, name, size)
    store.add((1, 2), 3)
    store.save()
    assert_starts_anew(path, warnings, "another vocabulary")


def test_damage_after_opening_loses_no_new_count(path: Path, warnings: list[str]) -> None:
    save_one(path)
    store = open_store(path)
    store.add((1, 2), 4)
    path.write_bytes(b"garbage")
    assert store.save()
    assert open_store(path).lookup((1, 2), 4) == (1, [(4, 1)])
    assert len(warnings) == 1


# What cannot be written

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise NO_SPACE


def test_a_directory_that_cannot_be_written_is_told_once(
    tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = open_store(tmp_path / "file" / "ngrams", max_records=3)
    for token in range(5):
        store.add((1,), token)
        assert not store.save()
    assert len(warnings) == 1 and "cannot be saved" in warnings[0]
    assert store.num_unsaved == 3  # memory stays bounded
    store.add((1,), 2)  # what is known is counted on
    assert store.lookup((1,), 1).best == [(2, 2)]


def test_a_file_that_cannot_be_read_is_not_overwritten(path: Path, warnings: list[str]) -> None:
    path.mkdir(parents=True)
    store = open_store(path)
    store.add((1,), 2)
    assert not store.save() and path.is_dir()
    assert len(warnings) == 2
    assert "cannot be read" in warnings[0] and "cannot be saved" in warnings[1]


@pytest.mark.parametrize("moment", ["opening", "writing", "renaming"])
def test_a_failed_write_leaves_the_old_file_and_loses_nothing(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save_one(path)
    before = path.read_bytes()

    @contextmanager
    def full_disk(final: Path, mode: int) -> Iterator[Any]:
        if moment == "opening":
            raise NO_SPACE
        with atomic_file(final, mode) as work:
            yield work if moment == "renaming" else SimpleNamespace(open=lambda mode: FullDisk())
            raise NO_SPACE

    store = open_store(path)
    with monkeypatch.context() as patch:
        patch.setattr(ngram_store, "atomic_file", full_disk)
        for _ in range(2):
            store.add((1, 2), 3)
            assert not store.save()
    assert path.read_bytes() == before
    assert len(warnings) == 1 and "no space left" in warnings[0].lower()
    assert store.lookup((1, 2), 4) == (9, [(3, 9)])
    assert store.save()
    assert open_store(path).lookup((1, 2), 4) == (9, [(3, 9)])
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_a_failure_after_the_rename_does_not_count_twice(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fails_late(final: Path, mode: int) -> Iterator[Path]:
        with atomic_file(final, mode) as work:
            yield work
        raise OSError(errno.EINVAL, "directories cannot be synced")

    monkeypatch.setattr(ngram_store, "atomic_file", fails_late)
    store = open_store(path)
    for _ in range(2):
        store.add((1, 2), 3)
        assert store.save()
    assert open_store(path).lookup((1, 2), 4) == store.lookup((1, 2), 4) == (2, [(3, 2)])
    assert not warnings


def test_what_another_process_saved_is_not_mixed_in_by_a_failed_save(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one(path)
    store = open_store(path)
    store.add((1, 2), 3)
    save_one(path)
    with monkeypatch.context() as patch:
        patch.setattr(ngram_store, "merged", fail)
        assert not store.save()
    assert store.lookup((1, 2), 4).best == [(3, 8)]
    assert store.save()
    assert store.lookup((1, 2), 4).best == [(3, 15)]


def fail(*args: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_an_interrupted_save_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one(path)
    before = path.read_bytes()

    @contextmanager
    def interrupted(final: Path, mode: int) -> Iterator[Path]:
        with atomic_file(final, mode) as work:
            yield work
            raise KeyboardInterrupt

    store = open_store(path)
    store.add((1, 2), 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ngram_store, "atomic_file", interrupted)
        store.save()
    assert path.read_bytes() == before
    assert store.save()  # the lock was let go
    assert open_store(path).lookup((1, 2), 4).best == [(3, 8)]


# Several processes


def test_a_locked_file_is_saved_later(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one(path)
    monkeypatch.setattr(ngram_store, "LOCK_TIMEOUT_S", 0.0)
    store = open_store(path)
    with FileLock(f"{path}.lock"):
        for _ in range(2):
            store.add((1, 2), 3)
            assert not store.save()
    assert len(warnings) == 1 and "another process" in warnings[0]
    assert store.save()
    assert open_store(path).lookup((1, 2), 4).best == [(3, 9)]


def test_counts_of_two_stores_are_added(path: Path) -> None:
    first, second = open_store(path), open_store(path)
    first.add((1,), 2, 3)
    second.add((1,), 2, 4)
    second.add((5,), 6)
    assert first.save() and second.save()
    first.add((1,), 2)
    assert first.save()
    assert first.lookup((1,), 4) == (8, [(2, 8)])
    assert first.lookup((5,), 4) == (1, [(6, 1)])


WRITER = """
import sys
from pathlib import Path
from edge_spec.drafters.lookup.ngram_store import NgramStore

store = NgramStore(Path(sys.argv[1]), "test-vocabulary", 50)
print("ready", flush=True)
sys.stdin.readline()
for save in range(15):
    for token in range(20):
        store.add((1, 2), token, token + 1)
        store.add((save, int(sys.argv[2])), token)
    while not store.save():
        pass
"""


def test_two_processes_that_save_at_once_lose_nothing(path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (30, 31)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    store = open_store(path)
    assert dict(store.lookup((1, 2), ALL).best) == {token: 30 * (token + 1) for token in range(20)}
    for number in (30, 31):
        for save in range(15):
            assert store.lookup((save, number), ALL).best == [(token, 1) for token in range(20)]
