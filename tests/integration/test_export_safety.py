"""An export replaces a bundle whole, and is otherwise as if it had not been tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, UnsupportedModelError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import OnnxExporter, export
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import open_bundle
from edge_spec.storage import atomic as storage
from edge_spec.storage.atomic import sha256_file

Checkpoints = Callable[..., StoredCheckpoint]


def silent(what: str, fraction: float) -> None:
    pass


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which no other test has left what it was interrupted in."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(
    checkpoint: StoredCheckpoint, out: Path, quantization: str = "fp32", progress: Progress = silent
) -> None:
    OnnxExporter().export(checkpoint, out, ExportOptions(quantization), progress)


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_progress_runs_from_little_to_all(checkpoint: Checkpoints, tmp_path: Path) -> None:
    told: dict[str, list[float]] = {}
    write(checkpoint(), tmp_path / "out", "fp32", lambda w, f: told.setdefault(w, []).append(f))
    assert len(told) == 2  # converting and comparing
    for fractions in told.values():
        assert fractions == sorted(fractions)
        assert 0 < fractions[0] < fractions[-1] == pytest.approx(1)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupt_leaves_everything_as_it_was(
    existing: bool,
    after: int,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    """Progress is told twice while converting, twice of the reference and four times of the
    bundle: each has two layers, and 128 tokens take four passes."""
    out = tmp_path / "out"
    if existing:
        write(checkpoint(), out, "int8")
    before = contents(tmp_path)
    num_told = 0

    def interrupt(what: str, fraction: float) -> None:
        nonlocal num_told
        num_told += 1
        if num_told == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(checkpoint(), out, "int4", interrupt)
    assert num_told == after
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])


@pytest.mark.parametrize("existing", [False, True])
def test_a_result_beyond_its_bound_is_not_kept(
    existing: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        write(checkpoint(), tmp_path / "out")
    before = contents(tmp_path)
    monkeypatch.setattr(export, "QUANTIZATIONS", {"int4": export.BlockQuantization(4, 1e-9)})
    with pytest.raises(ExportError, match=r"KL divergence 0\.\d+, allowed 1e-09") as caught:
        write(checkpoint(), tmp_path / "out", "int4")
    assert "--quant int8" in str(caught.value)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == existing


def test_a_result_that_is_no_number_is_not_kept(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build()
    model.weights["model.norm.weight"][0] = np.nan
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with np.errstate(all="ignore"), pytest.raises(ExportError, match="nan"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bundle_is_replaced_by_the_next(checkpoint: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    for quantization in ("fp32", "int4"):
        write(checkpoint(), out, quantization)
        assert open_bundle(out).manifest.quantization.startswith(quantization)
    assert [path.name for path in out.parent.iterdir()] == ["b"]


def test_a_bundle_survives_when_the_next_cannot_take_its_place(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write(checkpoint(), out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if Path(target) == out and not self.name.endswith(".old"):  # the new one, not the old back
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(storage, "swapped", lambda work, final: False)
    with pytest.raises(OSError, match="no space left"):
        write(checkpoint(), out, "int4")
    assert open_bundle(out).manifest.quantization == "fp32"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def refused(checkpoint: StoredCheckpoint, out: Path) -> None:
    before = contents(out.parent)
    with pytest.raises(UsageError, match="is not a bundle"):
        write(checkpoint, out)
    assert contents(out.parent) == before


def test_a_directory_of_other_files_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    refused(checkpoint(), out)


def test_a_file_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("years of work")
    refused(checkpoint(), tmp_path / "out")


@pytest.mark.parametrize("manifest", ["{}", '{"name": "my web application"}', ""])
def test_a_directory_with_another_kind_of_manifest_is_refused(
    manifest: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Web applications and browser extensions have a manifest.json as well."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    (out / "index.html").write_text("years of work")
    refused(checkpoint(), out)


def test_what_the_user_put_into_a_bundle_is_not_lost(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(checkpoint(), out)
    (out / "notes.txt").write_text("years of work")
    refused(checkpoint(), out)


@pytest.mark.parametrize("current", [False, True])
def test_an_empty_directory_is_used(
    current: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    if current:
        monkeypatch.chdir(tmp_path / "out")
    write(checkpoint(), Path() if current else tmp_path / "out")
    assert open_bundle(tmp_path / "out").manifest.name == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("quantization", ["q4_k_m", "INT4", " "])
def test_an_unknown_quantization_names_the_known_ones(
    quantization: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        write(checkpoint(), tmp_path / "out", quantization)
    assert repr(quantization) in str(caught.value)
    assert "int4, int8, fp16, fp32" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("block_size", [0, 16, 48, -32, 256])
def test_a_block_size_that_is_not_offered_names_those_that_are(
    block_size: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    options = ExportOptions("int4", block_size)
    with pytest.raises(UsageError) as caught:
        OnnxExporter().export(checkpoint(), tmp_path / "out", options, silent)
    assert str(block_size) in str(caught.value)
    assert "32, 64, 128" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_width_that_does_not_fit_integer_blocks_is_refused_for_them_alone(
    tiny: ModuleType, tmp_path: Path
) -> None:
    source = open_checkpoint(tiny.write_hf(tiny.build(hidden_size=48), tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"hidden size of 48.*--quant fp16"):
        write(source, tmp_path / "out", "int4")
    write(source, tmp_path / "out", "fp32")


def test_a_head_size_that_onnxruntime_does_not_take_is_refused(
    tiny: ModuleType, tmp_path: Path
) -> None:
    """Its GroupQueryAttention rotates multiples of 16 only."""
    source = open_checkpoint(tiny.write_hf(tiny.build("qwen3", head_dim=24), tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"24.*--runtime reference"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_other_head_sizes_are_exported(head_dim: int, tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build("qwen3", head_dim=head_dim)
    write(open_checkpoint(tiny.write_hf(model, tmp_path / "model")), tmp_path / "out")


def test_the_manifest_names_the_file_it_was_made_from(
    gguf: Callable[..., Path], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    write(open_checkpoint(gguf()), tmp_path / "from-file")
    write(checkpoint(), tmp_path / "from-directory")
    assert open_bundle(tmp_path / "from-file").manifest.source_sha256 == sha256_file(gguf())
    assert open_bundle(tmp_path / "from-directory").manifest.source_sha256 is None
