"""An export replaces a bundle or a file whole, and is otherwise as if it had not been tried."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf.constants import LlamaFileType

from edge_spec import load
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import (
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf import GgufExporter
from edge_spec.exporters.gguf import export as gguf_export
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.onnx import export as onnx_export
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import open_bundle
from edge_spec.storage.atomic import is_work
from fixtures.silence import quiet

Checkpoints = Callable[..., StoredCheckpoint]


class Format(NamedTuple):
    exporter: Any
    out: str
    exact: str  # a quantization
    small: str
    interrupts: tuple[tuple[int, bool], ...]  # at which report, and whether something was there
    stages: int  # of a small one's progress


# ONNX: twice while converting, twice of the reference and four times of the bundle: each has two
# layers, and 128 tokens take four passes. GGUF: for each of 21 tensors, then of the comparison for
# each of the source's two layers, and four times for what was written; llama.cpp, in a process that
# then has to end, tells of its tensors one by one as well.
FORMATS = {
    "onnx": Format(
        OnnxExporter(), "out", "fp32", "int4", ((1, False), (3, True), (5, False), (8, True)), 2
    ),
    "gguf": Format(
        GgufExporter(),
        "out.gguf",
        "F32",
        "Q4_0",
        ((1, False), (5, True), (22, False), (27, True)),
        2,
    ),
    "llama.cpp": Format(
        GgufExporter(), "out.gguf", "F32", "Q4_K_M", ((3, True), (22, False), (30, True)), 3
    ),
}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    if request.param == "llama.cpp":
        pytest.importorskip("llama_cpp")
    return FORMATS[request.param]


def write(
    form: str | Format,
    checkpoint: StoredCheckpoint,
    out: Path,
    quantization: str | None = None,
    progress: Progress = quiet,
    check: bool = False,
) -> ExportReport:
    chosen = FORMATS[form] if isinstance(form, str) else form
    options = ExportOptions(quantization or chosen.exact, check=check)
    report: ExportReport = chosen.exporter.export(checkpoint, out, options, progress)
    return report


def contents(directory: Path) -> dict[str, bytes]:
    """With hidden and temporary files, were there any."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def refused(form: str, checkpoint: StoredCheckpoint, out: Path, message: str) -> None:
    before = contents(out.parent)
    with pytest.raises(UsageError, match=message):
        write(form, checkpoint, out)
    assert contents(out.parent) == before


# All formats.


@pytest.mark.parametrize(
    ("name", "after", "existing"),
    [(name, *each) for name, form in FORMATS.items() for each in form.interrupts],
)
def test_an_interrupt_leaves_everything_as_it_was(
    name: str, after: int, existing: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    if name == "llama.cpp":
        pytest.importorskip("llama_cpp")
    interrupted(FORMATS[name], checkpoint(), tmp_path, after, existing)


def interrupted(
    form: Format, checkpoint: StoredCheckpoint, folder: Path, after: int, existing: bool
) -> None:
    if existing:
        write(form, checkpoint, folder / form.out)
    before, told = contents(folder), []

    def interrupt(what: str, fraction: float) -> None:
        told.append(what)
        if len(told) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(form, checkpoint, folder / form.out, form.small, interrupt, check=True)
    assert len(told) == after
    assert contents(folder) == before
    assert [path.name for path in folder.iterdir()] == ([form.out] if existing else [])


@pytest.mark.parametrize(("name", "existing"), [("onnx", True), ("onnx", False), ("gguf", True)])
def test_a_result_beyond_its_bound_is_not_kept(
    name: str,
    existing: bool,
    checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = FORMATS[name]
    if existing:
        write(form, checkpoint(), tmp_path / form.out)
    before = contents(tmp_path)
    monkeypatch.setattr(gguf_export, "QUANTIZATIONS", MappingProxyType({"Q4_0": 1e-9}))
    bound = onnx_export.BlockQuantization(4, 1e-9)
    monkeypatch.setattr(onnx_export, "QUANTIZATIONS", {"int4": bound})
    with pytest.raises(ExportError, match=r"KL divergence 0\.\d+, allowed 1e-09") as caught:
        write(form, checkpoint(), tmp_path / form.out, form.small, check=True)
    assert "--quant " + {"onnx": "int8", "gguf": "Q8_0"}[name] in str(caught.value)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == existing


@pytest.mark.parametrize(
    ("name", "quantization", "known"),
    [
        *(("onnx", each, "int4, int8, fp16, fp32") for each in ("q4_k_m", "INT4", " ")),
        *(("gguf", each, "F32, F16, BF16, Q8_0, ") for each in ("int4", "Q4", " ")),
        ("gguf", "Q4_7", "Q4_K_M"),
    ],
)
def test_an_unknown_quantization_names_the_known_ones(
    name: str, quantization: str, known: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        write(name, checkpoint(), tmp_path / "out", quantization)
    assert repr(quantization) in str(caught.value) and known in str(caught.value)
    assert not list(tmp_path.iterdir())


# What the user has at the place of a bundle, or of a file: text by name, and why it is kept.
KEPT: list[tuple[str, str, dict[str, str], str]] = [
    ("onnx", "out", {"out/thesis.tex": "years of work"}, "is not a bundle"),
    ("onnx", "out", {"out": "years of work"}, "is not a bundle"),
    *(  # web applications and browser extensions have a manifest.json as well
        ("onnx", "out", {"out/manifest.json": text, "out/index.html": "work"}, "is not a bundle")
        for text in ("{}", '{"name": "my web application"}', "")
    ),
    *(
        ("gguf", "out.gguf", {"out.gguf": text}, "is not a GGUF file")
        for text in ("years of work", "GGU", "ggUF")
    ),
    ("gguf", "out", {"out/thesis.tex": "work"}, "is a directory.*the name of a file"),
    ("gguf", "typo/out.gguf", {}, "there is no directory"),
]


@pytest.mark.parametrize(("name", "out", "files", "why"), KEPT)
def test_what_is_no_bundle_and_no_model_is_not_replaced(
    name: str, out: str, files: dict[str, str], why: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    refused(name, checkpoint(), tmp_path / out, why)


# Bundles.


def test_a_result_that_is_no_number_is_not_kept(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build()
    model.weights["model.norm.weight"][0] = np.nan
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with np.errstate(all="ignore"), pytest.raises(ExportError, match="nan"):
        write("onnx", source, tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()


def test_a_bundle_survives_when_the_next_cannot_take_its_place(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write("onnx", checkpoint(), out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if Path(target) == out and self.name != "out":  # the new one, not the old back
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no space left"):
        write("onnx", checkpoint(), out, "int4")
    assert open_bundle(out).manifest.quantization == "fp32"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_the_user_put_into_a_bundle_is_not_lost(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write("onnx", checkpoint(), out)
    (out / "notes.txt").write_text("years of work")
    refused("onnx", checkpoint(), out, "is not a bundle")


@pytest.mark.parametrize("current", [False, True])
def test_an_empty_directory_is_used(
    current: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    if current:
        monkeypatch.chdir(tmp_path / "out")
    write("onnx", checkpoint(), Path() if current else tmp_path / "out")
    assert open_bundle(tmp_path / "out").manifest.name == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


LARGE = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("variant", "shape", "problem", "runtime"),
    [
        ("qwen3", {"head_dim": 24}, "multiple of 16, this model has 24", "llamacpp"),
        ("qwen3", {"head_dim": 72, **LARGE}, "multiple of 16, this model has 72", "llamacpp"),
        ("llama", {"head_dim": 100, **LARGE}, "multiple of 16, this model has 100", "llamacpp"),
        ("llama", {"head_dim": 120, **LARGE}, "multiple of 16, this model has 120", "llamacpp"),
        (
            "qwen3",
            {"head_dim": 80, "partial_rotary_factor": 0.25, **LARGE},
            "rotates 20 of the 80 elements",
            "reference",
        ),
        (
            "llama",
            {"head_dim": 72, "partial_rotary_factor": 0.5, **LARGE},
            "multiple of 16, this model has 72",
            "reference",
        ),
    ],
)
def test_a_head_that_onnxruntime_does_not_compute_names_a_runtime_that_does(
    variant: str,
    shape: dict[str, float],
    problem: str,
    runtime: str,
    tiny: ModuleType,
    tmp_path: Path,
) -> None:
    """Its GroupQueryAttention takes and rotates multiples of 16 only."""
    path = tiny.write_hf(tiny.build(variant, **shape), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=problem) as caught:
        write("onnx", open_checkpoint(path), tmp_path / "out", check=True)
    assert caught.value.remedy == "Run it with --runtime llamacpp or reference."
    assert not (tmp_path / "out").exists()
    with load(path, runtime=runtime) as model:
        assert len(model.generate("hello", max_tokens=4).tokens) > 0


# GGUF files, and what llama.cpp does for them.


@pytest.mark.parametrize("link", [False, True])
def test_the_model_itself_is_never_replaced(
    link: bool, gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf("llama").read_bytes())
    out = path
    if link:
        out = tmp_path / "link.gguf"
        out.symlink_to(path)
    refused("gguf", open_checkpoint(path), out, "is the model itself")


@pytest.mark.parametrize("existing", [b"", b"GGUF and anything"])
def test_a_gguf_file_or_an_empty_one_is_replaced(
    existing: bytes, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.gguf").write_bytes(existing)
    monkeypatch.chdir(tmp_path)
    write("gguf", checkpoint(), Path("out.gguf"))
    assert open_checkpoint(tmp_path / "out.gguf").config.num_layers == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_K_M"])
def test_without_llama_cpp_only_what_needs_it_is_refused(
    quantization: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_export, "find_spec", lambda name: None)
    if quantization == "Q4_0":
        write("gguf", checkpoint(), tmp_path / "out.gguf", quantization)
        return
    with pytest.raises(MissingDependencyError, match=r'pip install -e "\.\[llamacpp\]"'):
        write("gguf", checkpoint(), tmp_path / "out.gguf", quantization)
    assert not list(tmp_path.iterdir())


def test_a_failure_of_llama_cpp_is_told(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "in.gguf").write_bytes(b"GGUF")
    with pytest.raises(ExportError, match=r"could not quantize.*failed") as caught:
        gguf_export.quantize(
            tmp_path / "in.gguf", tmp_path / "out.gguf", LlamaFileType.MOSTLY_Q6_K, quiet
        )
    assert "--quant Q4_0" in str(caught.value)


def test_a_file_that_llama_cpp_left_incomplete_is_not_kept(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not notice a full disk."""
    pytest.importorskip("llama_cpp")
    quantize = gguf_export.quantize

    def cut(source: Path, target: Path, file_type: LlamaFileType, progress: Progress) -> None:
        quantize(source, target, file_type, progress)
        target.write_bytes(target.read_bytes()[:-1000])

    monkeypatch.setattr(gguf_export, "quantize", cut)
    with pytest.raises(Exception, match="damaged"):
        write("gguf", checkpoint(), tmp_path / "out.gguf", "Q4_K_M")
    assert not list(tmp_path.iterdir())


def test_what_a_kill_of_llama_cpp_would_leave_is_known_as_unfinished_work(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    folders: list[Path] = []

    def refuse(source: Path, target: Path, file_type: LlamaFileType, progress: Progress) -> None:
        assert is_work(source.parent) and is_work(target)
        folders.append(source.parent)
        raise ExportError("refused", remedy="")

    monkeypatch.setattr(gguf_export, "quantize", refuse)
    with pytest.raises(ExportError, match="refused"):
        write("gguf", checkpoint(), tmp_path / "out.gguf", "Q4_K_M")
    assert not list(tmp_path.iterdir()) and not any(folder.exists() for folder in folders)


def test_a_library_beside_the_user_is_not_taken_for_llama_cpp(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "llama_cpp.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "ctypes.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    write("gguf", checkpoint(), tmp_path / "out.gguf", "Q4_K_M")


def test_no_process_is_left(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    started: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen[str]):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    interrupted(FORMATS["llama.cpp"], checkpoint(), tmp_path, 24, existing=False)
    assert len(started) == 1
    assert started[0].returncode not in (None, 0)
