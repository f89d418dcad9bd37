"""A conversion that was interrupted goes on where it stopped, to the same files as without that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cache_calls
from pathlib import Path
from types import ModuleType

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.errors import StorageError
from edge_spec.exporters import fitted_layers
from edge_spec.exporters.gguf import GgufExporter
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.storage.resumable import DIRECTORY

pytestmark = pytest.mark.skipif(os.name == "nt", reason="nothing is kept without locks of files")

NUM_LAYERS = 4
EXPORTERS = {"onnx": OnnxExporter(), "gguf": GgufExporter()}
# Arguments: format, model, out, quantization, whether it is checked, after how many reports of
# progress it says so, and waits for a line to go on.
EXPORT = """
import sys
from pathlib import Path
from edge_spec.core.export import ExportOptions
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.runtimes import load_exporter

format, model, out, quantization, check, after = sys.argv[1:]
num_told = 0

def progress(what, fraction):
    global num_told
    num_told += 1
    if num_told == int(after):
        print("there", flush=True)
        sys.stdin.readline()

source, options = open_checkpoint(Path(model)), ExportOptions(quantization, check=check == "True")
load_exporter(format).export(source, Path(out), options, progress)
print("done", flush=True)
"""

Told = list[tuple[str, float]]
Contents = dict[str, bytes]
Whole = Callable[[str, str, bool], Contents]


@pytest.fixture(scope="session")
def model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tiny.build(num_hidden_layers=NUM_LAYERS)
    return Path(tiny.write_gguf(built, tmp_path_factory.mktemp("resumed") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def export(
    format: str,
    model: Path,
    out: Path,
    quantization: str,
    check: bool = False,
    interrupted_after: int = 0,
) -> Told:
    """What progress was told. interrupted_after: that often, as by Ctrl-C."""
    told: Told = []

    def progress(what: str, fraction: float) -> None:
        told.append((what, fraction))
        if len(told) == interrupted_after:
            raise KeyboardInterrupt

    options = ExportOptions(quantization, check=check)
    EXPORTERS[format].export(open_checkpoint(model), out, options, progress)
    return told


def interrupt(format: str, model: Path, out: Path, quantization: str, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(format, model, out, quantization, interrupted_after=after)
    assert not out.exists()


def contents(out: Path) -> Contents:
    if out.is_file():
        return {"": out.read_bytes()}
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def kept(cache: Path) -> list[Path]:
    return sorted((cache / DIRECTORY).iterdir()) if (cache / DIRECTORY).exists() else []


@pytest.fixture(scope="session")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """whole(format, quantization, check): what an export writes that nothing stops."""

    @cache_calls
    def exported(format: str, quantization: str, check: bool) -> Contents:
        out = tmp_path_factory.mktemp("whole") / "out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGE_SPEC_CACHE", str(out.with_name("cache")))
            export(format, model, out, quantization, check)
        return contents(out)

    return exported


@contextmanager
def waiting(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of an export, until the end of the block."""
    command = [sys.executable, "-c", EXPORT, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("format", "quantization", "check", "after", "said"),
    [
        ("onnx", "int4", False, 2, "2 of 4 layers"),
        pytest.param(  # while it is compared
            "onnx", "fp16", True, NUM_LAYERS + 1, "4 of 4 layers", marks=pytest.mark.slow
        ),
        ("gguf", "Q8_0", False, 20, "20 of 39 tensors"),
        ("gguf", "Q6_K", False, 40, ""),  # while llama.cpp quantizes
    ],
)
def test_what_a_kill_stopped_goes_on_to_the_same_files(
    format: str,
    quantization: str,
    check: bool,
    after: int,
    said: str,
    model: Path,
    tmp_path: Path,
    cache: Path,
    whole: Whole,
) -> None:
    if quantization == "Q6_K":
        pytest.importorskip("llama_cpp")
    out = tmp_path / "out"
    with waiting(format, model, out, quantization, check, after) as process:
        process.kill()  # SIGKILL
        process.wait()
    assert not out.exists() and len(kept(cache)) == 1
    told = export(format, model, out, quantization, check)
    converting = {what for what, _ in told if what.startswith("Converting")}
    assert bool(converting) == bool(said) and all(said in what for what in converting)
    assert not kept(cache)
    assert contents(out) == whole(format, quantization, check)


def test_what_is_kept_is_not_made_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    fit = fitted_layers.FittedLayers._fit
    monkeypatch.setattr(
        fitted_layers.FittedLayers,
        "_fit",
        lambda self, group, name: made.append(name) or fit(self, group, name),
    )
    interrupt("onnx", model, tmp_path / "out", "int4", after=3)
    assert len(made) == 4 * 3
    made.clear()
    export("onnx", model, tmp_path / "out", "int4")
    assert len(made) == 4 and all(".3." in name for name in made)


@pytest.mark.parametrize("after", [1, 3])
def test_each_interrupt_of_several_is_gone_on_from(
    after: int, model: Path, tmp_path: Path, whole: Whole, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        interrupt("onnx", model, tmp_path / "out", "int8", after)
        assert "the same command goes on with it" in caplog.text
        after = 1  # what is kept is told of once
    told = export("onnx", model, tmp_path / "out", "int8")
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)
    assert "layers were kept" in told[0][0]
    assert contents(tmp_path / "out") == whole("onnx", "int8", False)


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "gguf"])
def test_what_a_full_disk_stopped_goes_on_once_there_is_room(
    format: str, model: Path, tmp_path: Path, cache: Path, whole: Whole
) -> None:
    """The disk's part is that of a limit on the size of files, at half of what is written."""
    resource = pytest.importorskip("resource")
    quantization = {"onnx": "int8", "gguf": "F16"}[format]
    expected = whole(format, quantization, False)
    size = max(map(len, expected.values()))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        with pytest.raises(StorageError, match="larger than a file may be"):
            export(format, model, tmp_path / "out", quantization)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists() and len(kept(cache)) == 1
    told = export(format, model, tmp_path / "out", quantization)
    assert "were kept" in told[0][0]
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("changed", ["source", "quantization"])
def test_another_result_does_not_go_on_with_it(
    changed: str, tiny: ModuleType, tmp_path: Path, cache: Path
) -> None:
    model = Path(tiny.write_gguf(tiny.build(), tmp_path / "tiny.gguf"))
    interrupt("onnx", model, tmp_path / "out", "int8", after=1)
    if changed == "source":
        tiny.write_gguf(tiny.build(seed=1), model)
    told = export("onnx", model, tmp_path / "out", {"source": "int8"}.get(changed, "int4"))
    assert "kept" not in told[0][0]
    assert len(kept(cache)) == 1  # the other one


def test_of_two_at_once_the_second_makes_its_own(model: Path, tmp_path: Path, cache: Path) -> None:
    with waiting("onnx", model, tmp_path / "first", "int8", False, 2) as process:
        told = export("onnx", model, tmp_path / "second", "int8")
        assert "kept" not in told[0][0]
        out, _ = process.communicate("go on\n", timeout=60)
        assert out == "done\n"
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert not kept(cache)
