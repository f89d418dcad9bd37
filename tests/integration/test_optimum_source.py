"""What is refused before optimum is even asked; none of it is needed here."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from edge_spec.cli.main import app
from edge_spec.core.export import ExportOptions
from edge_spec.errors import (
    EdgeSpecError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters import optimum as export
from edge_spec.exporters.optimum import OptimumExporter, open_source
from edge_spec.models import runtimes

ORIGINAL = "original_max_position_embeddings"


@pytest.fixture
def directory(tiny: ModuleType, tmp_path: Path) -> Path:
    """As GPT-2's, as far as anything is read here."""
    path = Path(tiny.write_hf(tiny.build(), tmp_path / "gpt2"))
    change(path / "config.json", model_type="gpt2")
    return path


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(path: Path, kind: type[EdgeSpecError]) -> str:
    with pytest.raises(kind) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_model_is_never_run(file: str, directory: Path) -> None:
    change(directory / file, auto_map={"AutoConfig": "code.Config"})
    text = refused(directory, UnsupportedModelError)
    assert "auto_map" in text
    assert file in text


def test_a_pickle_is_not_read(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pickle" in refused(directory, UnsupportedModelError)


def test_an_index_cannot_smuggle_a_pickle_in(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.bin")
    index = {"weight_map": {"transformer.wte.weight": "weights.bin"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weights.bin" in refused(directory, ModelFileError)
    index = {"weight_map": {"transformer.wte.weight": "../weights.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside the directory" in refused(directory, ModelFileError)


def test_weights_of_another_name_are_not_taken_for_the_models(directory: Path) -> None:
    """As an adapter's, or the maker's own format beside what is missing."""
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    assert "model.safetensors" in refused(directory, ModelFileError)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
def test_a_pipe_is_refused_unread(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    assert "no regular file" in refused(directory, ModelFileError)


def test_missing_and_damaged_files_are_named(directory: Path, tmp_path: Path) -> None:
    assert "no directory" in refused(tmp_path / "nothing.gguf", UnsupportedModelError)
    assert "config.json" in refused(tmp_path, ModelFileError)
    (directory / "model.safetensors").unlink()
    assert "model.safetensors" in refused(directory, ModelFileError)
    change(directory / "config.json", model_type=["gpt2"])
    assert "model_type" in refused(directory, ModelFileError)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (ExportOptions(quantization="fp16"), "int4, int8, fp32"),
        (ExportOptions(num_layers=1), "--layers"),
        (ExportOptions(compute="gpu"), "no option compute"),
    ],
    ids=["quantization", "layers", "compute"],
)
def test_options_that_it_does_not_know_are_refused(
    options: ExportOptions, word: str, directory: Path, tmp_path: Path
) -> None:
    source, out = open_source(directory), tmp_path / "out"
    with pytest.raises(UsageError, match=word):
        OptimumExporter().export(source, out, options, lambda what, done: None)
    assert not out.exists()


@pytest.mark.parametrize(
    ("values", "context", "num_tokens", "num_notes"),
    [
        ({}, 8192, 500, 0),
        ({"max_position_embeddings": 100}, 100, 100, 0),
        ({"max_position_embeddings": None}, 2048, 500, 0),
        ({"sliding_window": 1024}, 8192, 1088, 0),
        ({"sliding_window": 256}, 8192, 500, 0),
        ({"sliding_window": 4096}, 4096, 500, 1),
        ({"sliding_window": 8192}, 8192, 500, 0),
        ({"rope_scaling": {"rope_type": "longrope"}, **{ORIGINAL: 4096}}, 4096, 500, 1),
        ({"rope_scaling": {"type": "longrope", ORIGINAL: 4096}}, 4096, 500, 1),
        ({"rope_scaling": {"rope_type": "linear", ORIGINAL: 4096}}, 8192, 500, 0),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_the_context_ends_where_a_traced_graph_would_go_wrong(
    values: dict[str, Any], context: int, num_tokens: int, num_notes: int
) -> None:
    config = SimpleNamespace(**{"max_position_embeddings": 8192, **values})
    found, tokens, notes = export.plan_text(config, list(range(500)))
    assert (found, len(tokens), len(notes)) == (context, num_tokens, num_notes)


@pytest.fixture
def without_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(export, "version", version)


@pytest.mark.usefixtures("without_optimum")
def test_without_optimum_the_error_says_how_to_install_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingDependencyError, match=r"gpt2 .*pip install -e .\.\[optimum\]"):
        runtimes.exporter_for("onnx", directory)
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    answer = CliRunner().invoke(app, ["generate", str(directory), "hi", "--runtime", "ort"])
    assert isinstance(answer.exception, MissingDependencyError)


def test_the_onnx_exporter_names_the_one_that_may_know_the_architecture(directory: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*--format optimum"):
        runtimes.open_exportable(runtimes.load_exporter("onnx"), directory)
