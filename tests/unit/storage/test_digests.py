"""A large file is hashed once, and again after anything that changed it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.storage import measurements

SETTLED_NS = 5_000_000_000  # before now: longer than a file system's clock may lag


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files as they are hashed, with a cache of its own and every file a large one."""
    found: list[Path] = []
    really = measurements.sha256_file

    def sha256_file(path: Path) -> str:
        found.append(path)
        return really(path)

    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurements, "LARGE_BYTES", 1)
    monkeypatch.setattr(measurements, "sha256_file", sha256_file)
    # A file of a test is never old: its inode changed just now.
    now_ns = measurements.time.time_ns
    monkeypatch.setattr(measurements.time, "time_ns", lambda: now_ns() + SETTLED_NS)
    return found


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_it_is_hashed_once(tmp_path: Path, hashed: list[Path]) -> None:
    path = write(tmp_path / "model", b"weights")
    assert measurements.known_sha256(path) == measurements.known_sha256(path) == sha256(b"weights")
    assert hashed == [path]


def flip(path: Path) -> None:
    path.write_bytes(b"wEights")


def flip_and_hide(path: Path) -> None:
    """As a tool that sets the time back."""
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another(path: Path) -> None:
    before = path.stat()
    other = write(path.with_name("other"), b"wEights")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [flip, flip_and_hide, put_another])
def test_a_change_of_the_same_size_is_seen(
    tmp_path: Path, hashed: list[Path], change: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "model", b"weights")
    measurements.known_sha256(path)
    change(path)
    assert measurements.known_sha256(path) == sha256(b"wEights")


def test_nothing_is_kept_of_a_file_that_just_changed(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again before the clock of its file system moves on."""
    path = write(tmp_path / "model", b"weights")
    changed_ns = path.stat().st_ctime_ns
    monkeypatch.setattr(measurements.time, "time_ns", lambda: changed_ns)
    measurements.known_sha256(path)
    measurements.known_sha256(path)
    assert hashed == [path, path]


def test_small_files_are_not_kept(tmp_path: Path, hashed: list[Path]) -> None:
    path = write(tmp_path / "model", b"")
    assert measurements.known_sha256(path) == sha256(b"")
    assert not (tmp_path / "cache").exists()
