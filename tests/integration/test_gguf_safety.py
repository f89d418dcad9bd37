"""A GGUF export replaces a file whole, and is otherwise as if it had not been tried."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
from gguf.constants import LlamaFileType

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, MissingDependencyError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf import GgufExporter, export, kquants
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.storage.abandoned import is_work

Checkpoints = Callable[..., StoredCheckpoint]


def silent(what: str, fraction: float) -> None:
    pass


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which no other test has left what it was interrupted in."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(
    checkpoint: StoredCheckpoint,
    out: Path,
    quantization: str | None = "F32",
    progress: Progress = silent,
    check: bool = False,
) -> ExportReport:
    return GgufExporter().export(
        checkpoint, out, ExportOptions(quantization, check=check), progress
    )


def contents(directory: Path) -> dict[str, bytes]:
    """With hidden and temporary files, were there any."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def refused(checkpoint: StoredCheckpoint, out: Path, message: str) -> None:
    before = contents(out.parent)
    with pytest.raises(UsageError, match=message):
        write(checkpoint, out)
    assert contents(out.parent) == before


def test_the_default_is_q4_0(checkpoint: Checkpoints, tmp_path: Path) -> None:
    report = write(checkpoint(), tmp_path / "out.gguf", None)
    assert GgufFile(report.path).metadata["general.file_type"] == LlamaFileType.MOSTLY_Q4_0
    assert report.num_bytes == report.path.stat().st_size
    assert report.parity == {}


@pytest.mark.parametrize("quantization", ["q8_0", "Q8_0", "bF16"])
def test_the_case_of_a_name_does_not_matter(
    quantization: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    write(checkpoint(), tmp_path / "out.gguf", quantization)
    kind = open_checkpoint(tmp_path / "out.gguf").tensors["model.embed_tokens.weight"].kind
    assert kind.name == quantization.upper()


def test_an_unknown_quantization_names_the_known_ones(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for quantization in ("int4", "Q4", "", " "):
        with pytest.raises(UsageError) as caught:
            write(checkpoint(), tmp_path / "out.gguf", quantization)
        assert repr(quantization) in str(caught.value)
        assert "F32, F16, BF16, Q8_0, " in str(caught.value)
        assert "Q4_K_M" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_block_size_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GGUF formats fix their block sizes"):
        GgufExporter().export(
            checkpoint(), tmp_path / "out.gguf", ExportOptions("Q4_0", 32), silent
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["years of work", "GGU", "ggUF"])
def test_a_file_of_another_kind_is_refused(
    text: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "out.gguf").write_text(text)
    refused(checkpoint(), tmp_path / "out.gguf", "is not a GGUF file")


def test_a_directory_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused(checkpoint(), tmp_path / "out", "is a directory.*the name of a file")


def test_a_missing_directory_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    refused(checkpoint(), tmp_path / "typo" / "out.gguf", "there is no directory")


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
    refused(open_checkpoint(path), out, "is the model itself")


@pytest.mark.parametrize("existing", [b"", b"GGUF and anything"])
def test_a_gguf_file_or_an_empty_one_is_replaced(
    existing: bytes, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.gguf").write_bytes(existing)
    monkeypatch.chdir(tmp_path)
    write(checkpoint(), Path("out.gguf"))
    assert open_checkpoint(tmp_path / "out.gguf").config.num_layers == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("after", [1, 5, 21, 22, 27])
def test_an_interrupt_leaves_everything_as_it_was(
    after: int, existing: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Progress is told for each of 21 tensors, then of the comparison for each of the source's two
    layers, and four times for what was written."""
    interrupted(checkpoint(), tmp_path / "out.gguf", "F32", after, existing)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("after", [3, 22, 30])
def test_an_interrupt_of_llama_cpp_leaves_everything_as_it_was(
    after: int, existing: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """llama.cpp tells of its tensors one by one as well, in a process that then has to end."""
    pytest.importorskip("llama_cpp")
    interrupted(checkpoint(), tmp_path / "out.gguf", "Q4_K_M", after, existing)


def interrupted(
    checkpoint: StoredCheckpoint, out: Path, quantization: str, after: int, existing: bool
) -> None:
    if existing:
        write(checkpoint, out)
    before = contents(out.parent)
    num_told = 0

    def interrupt(what: str, fraction: float) -> None:
        nonlocal num_told
        num_told += 1
        if num_told == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(checkpoint, out, quantization, interrupt, check=True)
    assert num_told == after
    assert contents(out.parent) == before
    assert len(list(out.parent.iterdir())) == existing


def test_progress_runs_from_little_to_all(checkpoint: Checkpoints, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    told: dict[str, list[float]] = {}

    def listen(what: str, fraction: float) -> None:
        told.setdefault(what, []).append(fraction)

    write(checkpoint(), tmp_path / "out.gguf", "Q6_K", listen, check=True)
    assert len(told) == 3  # converting, quantizing and comparing
    for fractions in told.values():
        assert fractions == sorted(fractions)
        assert 0 < fractions[0] < fractions[-1] == pytest.approx(1)


@pytest.mark.parametrize("existing", [False, True])
def test_a_result_beyond_its_bound_is_not_kept(
    existing: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        write(checkpoint(), tmp_path / "out.gguf")
    before = contents(tmp_path)
    strict = export.GgufQuantization(LlamaFileType.MOSTLY_Q4_0, export.Kind.Q4_0, 1e-9)
    monkeypatch.setattr(export, "QUANTIZATIONS", MappingProxyType({"Q4_0": strict}))
    with pytest.raises(ExportError, match=r"KL divergence 0\.\d+, allowed 1e-09.*--quant Q8_0"):
        write(checkpoint(), tmp_path / "out.gguf", "Q4_0", check=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("installed", [True, False])
def test_the_result_is_compared_with_the_source(
    installed: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By llama.cpp where it is installed, which rounds the cache, otherwise by the reference."""
    if installed:
        pytest.importorskip("llama_cpp")
    else:
        monkeypatch.setattr(export, "find_spec", lambda name: None)
    parity = write(checkpoint(), tmp_path / "out.gguf", "F32", check=True).parity
    assert set(parity) >= {"kl_divergence", "max_logit_difference", "perplexity"}
    assert parity["kl_divergence"] < 1e-3
    assert (parity["max_logit_difference"] > 1e-3) == installed


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_K_M"])
def test_without_llama_cpp_only_what_needs_it_is_refused(
    quantization: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kquants, "find_spec", lambda name: None)
    if quantization == "Q4_0":
        write(checkpoint(), tmp_path / "out.gguf", quantization)
        return
    with pytest.raises(MissingDependencyError, match=r'pip install "edge-spec\[llamacpp\]"'):
        write(checkpoint(), tmp_path / "out.gguf", quantization)
    assert not list(tmp_path.iterdir())


def test_what_llama_cpp_says_goes_to_the_log_alone(
    checkpoint: Checkpoints,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("llama_cpp")
    with caplog.at_level(logging.DEBUG, "edge_spec.llama.cpp"):
        write(checkpoint(), tmp_path / "out.gguf", "Q4_K_M")
    assert capfd.readouterr() == ("", "")
    assert "blk.1.ffn_down.weight" in caplog.text


def test_a_failure_of_llama_cpp_is_told(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "in.gguf").write_bytes(b"GGUF")
    with pytest.raises(ExportError, match=r"could not quantize.*failed") as caught:
        kquants.quantize(
            tmp_path / "in.gguf", tmp_path / "out.gguf", LlamaFileType.MOSTLY_Q6_K, silent
        )
    assert "--quant Q4_0" in str(caught.value)


def test_a_file_that_llama_cpp_left_incomplete_is_not_kept(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not notice a full disk."""
    pytest.importorskip("llama_cpp")
    quantize = kquants.quantize

    def cut(source: Path, target: Path, file_type: LlamaFileType, progress: Progress) -> None:
        quantize(source, target, file_type, progress)
        target.write_bytes(target.read_bytes()[:-1000])

    monkeypatch.setattr(kquants, "quantize", cut)
    with pytest.raises(Exception, match="damaged"):
        write(checkpoint(), tmp_path / "out.gguf", "Q4_K_M")
    assert not list(tmp_path.iterdir())


def test_what_a_kill_of_llama_cpp_would_leave_is_known_as_unfinished_work(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    folders: list[Path] = []

    def refuse(source: Path, target: Path, file_type: LlamaFileType, progress: Progress) -> None:
        assert source.parent == target.parent and is_work(source.parent)
        folders.append(source.parent)
        raise ExportError("refused", remedy="")

    monkeypatch.setattr(kquants, "quantize", refuse)
    with pytest.raises(ExportError, match="refused"):
        write(checkpoint(), tmp_path / "out.gguf", "Q4_K_M")
    assert not list(tmp_path.iterdir()) and not any(folder.exists() for folder in folders)


def test_a_library_beside_the_user_is_not_taken_for_llama_cpp(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "llama_cpp.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "ctypes.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    write(checkpoint(), tmp_path / "out.gguf", "Q4_K_M")


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
    interrupted(checkpoint(), tmp_path / "out.gguf", "Q4_K_M", 24, existing=False)
    assert len(started) == 1
    assert started[0].returncode not in (None, 0)
