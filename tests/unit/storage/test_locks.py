"""Locks between processes and threads, and where there are none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edge_spec.errors import StorageError
from edge_spec.storage import atomic as locks
from edge_spec.storage.atomic import locked


@pytest.mark.parametrize("what", ["", "model.gguf of owner/name"])
def test_who_waits_is_told_once_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    monkeypatch.setattr(locks, "TOLD_AFTER_S", 0.01)
    with locked(tmp_path / "file", 1.0):
        for timeout_s in (0.05, 0.0):
            with pytest.raises(TimeoutError), locked(tmp_path / "file", timeout_s, what):
                raise AssertionError("two at once")
    told = f"waiting for another process to write {what or tmp_path / 'file'}"
    assert caplog.messages == [told]
    with locked(tmp_path / "file", 0.0):
        pass
    assert caplog.messages == [told]
    assert [path.name for path in tmp_path.iterdir()] == ["file.lock"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "file.lock").touch()  # as a kill leaves it
    entered = False
    with locked(tmp_path / "file", 1.0), locked(tmp_path / "new", 1.0):
        entered = True
    assert entered


def test_a_cache_that_is_a_file_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match=r"Not a dir.*: .*a.json.*set EDGE_SPEC_CACHE"),
        locked(tmp_path / "file" / "profiles" / "a.json", 1.0),
    ):
        raise AssertionError("entered")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        locked(tmp_path / "file", 1.0).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    with locked(tmp_path / "file", 0.0):
        pass
    assert (tmp_path / "file.lock").exists()
