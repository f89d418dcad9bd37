"""A folder of unfinished work, and a file whose finished steps are found again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edge_spec.errors import UnsupportedModelError
from edge_spec.storage import resumable
from edge_spec.storage.resumable import (
    DIRECTORY,
    KEPT_DAYS,
    StepFile,
    resumable_directory,
    resumable_file,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="nothing is kept without locks of files")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / DIRECTORY


def interrupted(final: Path, error: type[BaseException] = KeyboardInterrupt) -> None:
    with pytest.raises(error), resumable_directory(final, "key", "data") as work:
        with StepFile(work.result / "data", work.log) as file:
            file.write(b"one")
            file.finish("first")
            file.write(b"tw")
        (work.result / "manifest").write_text("of the first")
        raise error


def test_finished_steps_are_found_again_and_nothing_else(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    with resumable_directory(tmp_path / "out", "key", "data") as work:
        assert [path.name for path in work.result.iterdir()] == ["data"]
        with StepFile(work.result / "data", work.log) as file:
            assert (file.steps, file.end) == (["first"], 3)
            file.write(b"three")
            file.finish("second")
            assert file.sha256() == resumable.hashlib.sha256(b"onethree").hexdigest()
    assert (tmp_path / "out" / "data").read_bytes() == b"onethree"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


@pytest.mark.parametrize("error", [UnsupportedModelError, ValueError])
def test_after_an_error_that_would_come_again_nothing_is_kept(
    error: type[Exception], tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(error), resumable_directory(tmp_path / "out", "key", "data") as work:
        with StepFile(work.result / "data", work.log) as file:
            file.finish("first")
        raise error("no", remedy="none") if error is UnsupportedModelError else error
    assert not list(cache.iterdir()) and not (tmp_path / "out").exists()


def test_without_a_finished_step_nothing_is_kept(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt), resumable_file(tmp_path / "out", "key") as work:
        with StepFile(work.result, work.log) as file:
            file.write(b"a part of a step")
        raise KeyboardInterrupt
    assert not list(cache.iterdir())


@pytest.mark.parametrize("num_kept", range(4))
def test_steps_up_to_the_first_damaged_one_count(num_kept: int, tmp_path: Path) -> None:
    path, log = tmp_path / "data", tmp_path / "log"
    with StepFile(path, log) as file:
        for step in range(3):
            file.write(bytes([step]) * 100)
            file.finish(step)
    content = bytearray(path.read_bytes() + b"more")
    content[100 * num_kept + 3] ^= 1
    path.write_bytes(content)
    for _ in range(2):  # what was cut is not there the next time
        with StepFile(path, log) as file:
            assert file.steps == list(range(num_kept))
        assert path.stat().st_size == 100 * num_kept
        assert len(log.read_bytes().splitlines()) == num_kept


@pytest.mark.parametrize("line", range(3))
@pytest.mark.parametrize("at", [0, 70, -1])  # in the seal, in what it seals, at the end
def test_a_damaged_line_of_the_log_ends_it(line: int, at: int, tmp_path: Path) -> None:
    path, log = tmp_path / "data", tmp_path / "log"
    with StepFile(path, log) as file:
        for step in range(3):
            file.write(b"one")
            file.finish(step)
    lines = [bytearray(each) for each in log.read_bytes().splitlines(keepends=True)]
    lines[line][at] ^= 1
    log.write_bytes(b"".join(lines))
    with StepFile(path, log) as file:
        assert (file.steps, file.end) == (list(range(line)), 3 * line)


@pytest.mark.parametrize("line", [b"", b"abc", b"abc [1]\n", b"abc [0, 1]\n", b"\xff \xff\n"])
def test_a_line_that_is_no_step_ends_the_log(line: bytes, tmp_path: Path) -> None:
    path, log = tmp_path / "data", tmp_path / "log"
    with StepFile(path, log) as file:
        file.write(b"one")
        file.finish({"first": 1})
    log.write_bytes(log.read_bytes() + line)
    with StepFile(path, log) as file:
        assert (file.steps, file.end) == ([{"first": 1}], 3)


def test_what_nobody_went_on_with_for_a_week_goes(tmp_path: Path, cache: Path) -> None:
    interrupted(tmp_path / "out")
    (kept,) = cache.iterdir()
    for age_days, is_there in ((KEPT_DAYS - 1, True), (KEPT_DAYS + 1, False)):
        os.utime(kept, (time.time() - age_days * 86400,) * 2)
        with resumable_file(tmp_path / "other", "other") as work:
            work.result.touch()
        assert kept.exists() == is_there


def test_in_a_folder_that_is_taken_nobody_else_writes(tmp_path: Path, cache: Path) -> None:
    with resumable_file(tmp_path / "first", "key") as first:
        with resumable_file(tmp_path / "second", "key") as second:
            assert second.folder != first.folder and second.folder.parent == tmp_path
            second.result.write_text("second")
        first.result.write_text("first")
    assert (tmp_path / "first").read_text() == "first"
    assert (tmp_path / "second").read_text() == "second"
    assert not list(cache.iterdir())


def test_where_nothing_can_be_renamed_to_its_place_nothing_is_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_file_system(self: Path, target: Path) -> Path:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(resumable.Path, "rename", other_file_system)
    with resumable_file(tmp_path / "out", "key") as work:
        monkeypatch.undo()
        assert work.folder.parent == tmp_path
        work.result.write_text("whole")
    assert (tmp_path / "out").read_text() == "whole"


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with resumable_file(tmp_path / "out", "key") as work:
        work.result.write_text("whole")
    assert (tmp_path / "out").read_text() == "whole"
