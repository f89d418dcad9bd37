"""A runtime that fails while a model is opened is said in one line, and the next one runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.isolated import IsolatedError
from edge_spec.errors import DeviceError, DeviceMemoryError
from edge_spec.loader import load_engine
from edge_spec.loader import open as opening
from edge_spec.models.bundle import Bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.runtimes.llamacpp import LlamaCppRuntime
from fixtures.silence import quiet

pytest.importorskip("onnxruntime")
pytest.importorskip("llama_cpp")

OPTIONS = LoadOptions(threads=1, drafter="none")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def model(gguf: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf().read_bytes())
    return path


def keep_conversion(model: Path, bundle: Bundle) -> None:
    kept = Source(str(model), quiet).cached("onnx", ExportOptions())
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.symlink_to(bundle.path, target_is_directory=True)


def runtime_of(model: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    """Returns which runtime has written, and the lines that were said."""
    with load_engine(str(model), OPTIONS, quiet) as engine:
        assert len(engine.generate([5, 6, 7], max_tokens=4).tokens) == 4
        found = engine.runtime
    return found, [line for line in caplog.messages if "cannot run" in line]


def mark_of(model: Path, cache: Path) -> Path:
    mark = cache / "opening" / f"llamacpp-{Source(str(model), quiet).identity}"
    mark.parent.mkdir(parents=True)
    return mark


def ended_process() -> str:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return str(process.pid)


def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def require_fit(target: Any, *given: Any) -> None:
        if target.runtime.name == "llamacpp":
            raise DeviceMemoryError("it needs 9 GB, and there are 8 GB", remedy="Free some.")

    monkeypatch.setattr(opening, "require_fit", require_fit)


def test_where_memory_is_short_the_next_that_converts_nothing_runs_it(
    model: Path,
    exported: Callable[..., Bundle],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep_conversion(model, exported())
    short_of_memory(monkeypatch)
    runtime, [line] = runtime_of(model, caplog)
    assert runtime == "ort" and "needs 9 GB, and there are 8 GB" in line
    assert line.endswith(": ort runs it")


def test_where_memory_is_short_nothing_is_converted_for_it(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(monkeypatch)
    with pytest.raises(DeviceMemoryError, match="needs 9 GB"):
        load_engine(str(model), OPTIONS, quiet)
    assert not (cache / "bundles").exists()


def test_a_runtime_that_cannot_open_the_model_is_passed_over(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(self: LlamaCppRuntime, *given: Any) -> None:
        raise DeviceError("llama.cpp has lost a device", remedy="Start again.")

    monkeypatch.setattr(LlamaCppRuntime, "open", lost)
    runtime, [line] = runtime_of(model, caplog)
    assert runtime == "ort" and "llama.cpp has lost a device" in line
    with pytest.raises(DeviceError, match="lost a device"):  # that was asked for
        load_engine(str(model), LoadOptions(runtime="llamacpp"), quiet)


@pytest.mark.skipif(sys.platform == "win32", reason="no mark is read there")
def test_a_runtime_that_ends_the_process_is_tried_apart_and_passed_over(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*given: Any, **named: Any) -> None:
        raise IsolatedError("the library ended the process (SIGSEGV): it printed nothing")

    mark_of(model, cache).write_text(ended_process())
    monkeypatch.setattr(opening, "isolated", crash)
    runtime, [line] = runtime_of(model, caplog)
    assert runtime == "ort" and "does not survive opening model: the library ended" in line


@pytest.mark.skipif(sys.platform == "win32", reason="no mark is read there")
def test_a_process_that_was_killed_while_it_opened_a_model_costs_one_trial(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[object] = []
    mark = mark_of(model, cache)
    mark.write_text(ended_process())
    monkeypatch.setattr(opening, "isolated", lambda work, *given, **named: tried.append(work))
    for _ in range(2):
        assert runtime_of(model, caplog) == ("llamacpp", [])
        assert not mark.exists()
    assert tried == [opening.open_described]


def test_another_process_that_is_opening_it_is_no_reason_for_a_trial(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mark_of(model, cache).write_text(str(os.getpid()))
    monkeypatch.setattr(opening, "isolated", None)  # would be called
    assert runtime_of(model, caplog) == ("llamacpp", [])
