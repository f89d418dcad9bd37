"""Files and directories appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from edge_spec.errors import StorageError
from edge_spec.storage.atomic import (
    CACHE_VARIABLE,
    atomic_directory,
    atomic_file,
    cache_directory,
    expanded,
    scratch_beside,
    sha256_file,
)


def write_old(final: Path) -> None:
    final.mkdir()
    (final / "model.bin").write_text("old")


def listing(directory: Path) -> dict[str, str | None]:
    """Every path below `directory`, hidden ones included, with the text of files."""
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def test_a_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "bundle"
    with atomic_directory(final) as work:
        (work / "model.bin").write_text("new")
        (work / "sub").mkdir()
        (work / "sub" / "more.bin").write_text("more")
        assert not final.exists()
        assert work.parent == final.parent  # one file system: the rename cannot copy
    assert listing(tmp_path / "deep") == {
        **{"bundle": None, "bundle/model.bin": "new"},
        **{"bundle/sub": None, "bundle/sub/more.bin": "more"},
    }
    assert final.stat().st_mode & 0o777 == 0o755


def test_a_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    write_old(tmp_path / "bundle")
    with atomic_directory(tmp_path / "bundle") as work:
        (work / "other.bin").write_text("new")
        assert (tmp_path / "bundle" / "model.bin").read_text() == "old"
    assert listing(tmp_path) == {"bundle": None, "bundle/other.bin": "new"}


def write_half(work: Path) -> None:
    (work / "model.bin" if work.is_dir() else work).write_text("half")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("atomic", [atomic_directory, atomic_file, scratch_beside])
def test_an_error_in_the_block_leaves_what_was_there(
    atomic: Any, tmp_path: Path, existed: bool, error: type[BaseException]
) -> None:
    if existed:
        (tmp_path / "model.gguf").write_text("old")
    before = listing(tmp_path)
    with pytest.raises(error), atomic(tmp_path / "model.gguf") as work:
        write_half(work)
        raise error
    assert listing(tmp_path) == before


@pytest.mark.parametrize("failing", ["bundle", "work"])
def test_a_rename_that_fails_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    # As on Windows, where a directory with an open file cannot be renamed.
    write_old(tmp_path / "bundle")
    before, rename = listing(tmp_path), Path.rename

    def rename_but_one(self: Path, target: Any) -> Any:
        is_old = self == tmp_path / "bundle"
        is_work = Path(target) == tmp_path / "bundle" and (self / "new.bin").exists()
        if is_old if failing == "bundle" else is_work:
            raise PermissionError("in use")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_but_one)
    with pytest.raises(PermissionError), atomic_directory(tmp_path / "bundle") as work:
        (work / "new.bin").write_text("new")
    assert listing(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="nothing is locked there")
def test_of_many_that_replace_a_directory_at_once_each_finds_it_whole(tmp_path: Path) -> None:
    write_old(tmp_path / "bundle")
    start = Barrier(8)

    def replace(number: int) -> None:
        with atomic_directory(tmp_path / "bundle") as work:
            (work / "model.bin").write_text(str(number))
            start.wait(60)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(replace, range(8))) == [None] * 8
    found = listing(tmp_path)
    assert found.keys() == {"bundle", "bundle/model.bin"}
    assert found["bundle/model.bin"] in map(str, range(8))


def test_of_two_that_write_at_once_the_later_one_wins_whole(tmp_path: Path) -> None:
    final = tmp_path / "bundle"
    with atomic_directory(final) as later:
        (later / "model.bin").write_text("later")
        with atomic_directory(final) as earlier:
            (earlier / "other.bin").write_text("earlier")
    assert listing(tmp_path) == {"bundle": None, "bundle/model.bin": "later"}


def test_a_link_stays_and_leads_to_the_new_directory(tmp_path: Path) -> None:
    write_old(tmp_path / "bundle")
    (tmp_path / "link").symlink_to("bundle")
    with atomic_directory(tmp_path / "link") as work:
        (work / "other.bin").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert listing(tmp_path / "bundle") == {"other.bin": "new"}
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "link"}


def test_in_the_cache_what_a_kill_left_of_any_file_goes_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    models = tmp_path / "models"
    (models / ".killed.abcd_123.part").mkdir(parents=True)
    os.utime(models / ".killed.abcd_123.part", (0, 0))
    with scratch_beside(models / "a") as running:
        (running / "weights").touch()  # just now
        os.utime(running, (0, 0))
        with atomic_file(models / "b"):
            pass
        assert {path.name for path in models.iterdir()} == {running.name, "b"}


def test_a_scratch_goes_with_its_block(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "bundle"
    with scratch_beside(final) as scratch:
        (scratch / "sub").mkdir()
        assert scratch.parent == final.parent  # one file system: what is moved out is not copied
    assert listing(tmp_path) == {"deep": None}


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old = ".bundle.abcd_123.part"
    left = (".bundle.abcd_124.part", ".other.abcd_123.part")  # of today, of another one
    for name in (old, *left):
        (tmp_path / name).mkdir()
    for name in (old, left[1]):
        os.utime(tmp_path / name, (0, 0))
    with atomic_directory(tmp_path / "bundle"):
        pass
    assert set(listing(tmp_path)) == {*left, "bundle"}


def test_what_others_keep_under_such_names_stays(tmp_path: Path) -> None:
    for name in (
        ".emacs.d",
        ".emacs.old",
        ".emacs.bak.old",
        ".emacs.a.part",
        ".emacs.ABCDEFGH.part",
    ):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    before = set(listing(tmp_path))
    with atomic_file(tmp_path / "emacs"):
        pass
    assert set(listing(tmp_path)) == before | {"emacs"}


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "model.gguf"
    with atomic_file(final) as work:
        work.write_text("new")
        assert not final.exists()
    assert listing(tmp_path / "deep") == {"model.gguf": "new"}
    assert final.stat().st_mode & 0o777 == 0o644


def test_a_file_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power in between would leave an empty file there, and none of the old."""
    final, synced = tmp_path / "file", []

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size, final.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_file(final) as work:
        work.write_text("new")
    assert (final.stat().st_ino, 3, False) in synced


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=lambda number: errno.errorcode[number]
)
@pytest.mark.parametrize("atomic", [atomic_file, atomic_directory, scratch_beside])
def test_a_full_disk_is_one_line_and_leaves_the_old_file(
    tmp_path: Path, atomic: Any, number: int
) -> None:
    (tmp_path / "file").write_text("old")
    told = rf"{os.strerror(number)}: .*file\. (Free|Raise) .*, or choose another place\."
    with pytest.raises(StorageError, match=told) as caught, atomic(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert "\n" not in str(caught.value) and caught.value.errno == number
    assert listing(tmp_path) == {"file": "old"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a system that has FIFOs")
@pytest.mark.parametrize("name", ["fifo", "link"])
@pytest.mark.parametrize("atomic", [atomic_file, atomic_directory])
def test_what_is_no_regular_file_is_not_replaced(atomic: Any, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with (
        pytest.raises(StorageError, match="is no regular file") as caught,
        atomic(tmp_path / name),
    ):
        raise AssertionError("entered")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "link").is_symlink()
    assert len(listing(tmp_path)) == 2


def test_a_link_to_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with atomic_file(tmp_path / "link") as work:
        work.write_text("new")
    assert listing(tmp_path) == {"file": "old", "link": "new"}


@pytest.mark.skipif(os.name == "nt", reason="directories are not synced there")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
@pytest.mark.parametrize("of_directories", [True, False])
def test_a_file_system_that_syncs_no_directories_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, of_directories: bool
) -> None:
    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_directories:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", sync)
    is_none = of_directories and number != errno.EIO
    with nullcontext() if is_none else pytest.raises(OSError), atomic_file(tmp_path / "file"):
        pass
    with (
        nullcontext() if is_none else pytest.raises(OSError),
        atomic_directory(tmp_path / "a") as a,
    ):
        (a / "file").touch()


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_the_variable_overrides_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of nobody is a name like others."""
    monkeypatch.setenv("HOME", "/home/somebody")
    nobody = "~nobody-of-this-name/cache"
    assert expanded(Path(nobody)) == Path(nobody)
    for value, place in (("~/cache", "/home/somebody/cache"), (nobody, nobody)):
        monkeypatch.setenv(CACHE_VARIABLE, value)
        assert cache_directory() == Path(place)
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_directory().name == "edge-spec"
