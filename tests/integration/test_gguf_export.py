"""Exported GGUF files hold the weights of their source, and llama.cpp scores them as it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.constants import LlamaFileType

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, UnsupportedModelError
from edge_spec.exporters import parity
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf import GgufExporter
from edge_spec.exporters.gguf.export import quantize
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import tiny_models
from fixtures.axes import each

VARIANTS = (
    *("llama", "llama-tied", "llama-linear", "llama-llama3", "llama-bias"),
    *("mistral", "qwen2", "qwen3"),
)
# Of random weights rounding takes this part of the norm, measured; a shuffled row takes 140 %.
ROUNDING = {"F32": 0.0, "F16": 0.0, "BF16": 0.0, "Q8_0": 0.01, "Q5_1": 0.05, "Q5_0": 0.06}
ROUNDING |= {"Q4_1": 0.1, "Q4_0": 0.12}

Paths = Callable[..., Path]
Tokens = Callable[..., list[int]]


def silent(what: str, fraction: float) -> None:
    pass


def write(
    checkpoint: StoredCheckpoint,
    out: Path,
    quantization: str | None = "F32",
    progress: Progress = silent,
    **options: Any,
) -> ExportReport:
    options = {"check": False} | options
    return GgufExporter().export(checkpoint, out, ExportOptions(quantization, **options), progress)


@pytest.fixture(scope="session")
def converted(hf: Paths, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """converted(variant, quantization): a GGUF file made from a Hugging Face directory."""

    @cache
    def convert(variant: str = "llama", quantization: str = "F32") -> Path:
        out = tmp_path_factory.mktemp("converted") / f"{variant}.{quantization}.gguf"
        write(open_checkpoint(hf(variant)), out, quantization)
        return out

    return convert


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("variant", "quantization"), each(VARIANTS, ["F32", "F16", "Q8_0"]))
def test_llama_cpp_scores_as_the_reference(
    variant: str,
    quantization: str,
    converted: Paths,
    open_llama: Callable[..., LlamaCppModel],
    tokens: Tokens,
) -> None:
    """Against the reference with the written weights. Of Q8_0 files llama.cpp rounds activations
    to int8 as well, of F16 files to float16."""
    pytest.importorskip("llama_cpp")
    path = converted(variant, quantization)
    text = tokens(40)
    model = open_llama("llamacpp", path, kv_type="f32", flash_attention=False)
    found = parity.score_text(model, text)
    model.close()
    expected = parity.score_text(ReferenceModel(open_checkpoint(path)), text)
    bound = {"F32": 1e-3, "F16": 5e-3, "Q8_0": 0.05}[quantization]
    assert relative_error(found, expected) < bound


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0", "Q4_K_M", "Q6_K"])
def test_rows_that_fill_no_block_are_stored_as_float16(
    quantization: str,
    tiny: ModuleType,
    tmp_path: Path,
    open_llama: Callable[..., LlamaCppModel],
    tokens: Tokens,
) -> None:
    pytest.importorskip("llama_cpp")
    source = open_checkpoint(tiny.write_hf(tiny.build(hidden_size=48), tmp_path / "model"))
    write(source, tmp_path / "out.gguf", quantization)
    written = open_checkpoint(tmp_path / "out.gguf")
    for name, tensor in written.tensors.items():
        if len(tensor.shape) == 2:
            assert (tensor.kind == Kind.F16) == (tensor.shape[1] == 48), name
    text = tokens(20)
    model = open_llama("llamacpp", tmp_path / "out.gguf", kv_type="f32", flash_attention=False)
    found = parity.score_text(model, text)
    model.close()
    assert relative_error(found, parity.score_text(ReferenceModel(written), text)) < 0.05


@pytest.mark.parametrize("quantization", ["F16", "Q4_0", "Q8_0"])
def test_values_beyond_float16_are_refused_for_it(
    quantization: str, tiny: ModuleType, tmp_path: Path
) -> None:
    """Blocks have scales of float16."""
    model = tiny.build()
    model.weights["lm_head.weight"][0, 0] = 1e8
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with pytest.raises(ExportError, match=r"output\.weight.* cannot hold.*--quant BF16"):
        write(source, tmp_path / "out.gguf", quantization)
    write(source, tmp_path / "out.gguf", "BF16")


@pytest.mark.parametrize(
    ("variant", "overrides", "reason"),
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotations are scaled"),
        ("qwen2", {"rope_scaling": tiny_models.LLAMA3}, "scaled one by one"),
        ("qwen3", {"attention_bias": True}, "output has a bias"),
        ("qwen2", {"head_dim": 32}, "not as wide"),
    ],
)
def test_what_llama_cpp_would_misread_is_refused(
    variant: str, overrides: dict[str, Any], reason: str, tiny: ModuleType, tmp_path: Path
) -> None:
    model = tiny.build(variant, **overrides)
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=rf"{variant}.*{reason}.*--format onnx"):
        write(source, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_those_that_llama_cpp_makes(
    quantization: str, converted: Paths, tmp_path: Path
) -> None:
    """But for the embedding, to which it gives as few bits as to the layers."""
    pytest.importorskip("llama_cpp")
    file_type = LlamaFileType[f"MOSTLY_{quantization}"]
    quantize(converted("llama", "F32"), tmp_path / "out.gguf", file_type, silent)
    expected = GgufFile(tmp_path / "out.gguf").tensors
    found = GgufFile(converted("llama", quantization)).tensors
    layers = [name for name in expected if name.startswith("blk.")]
    assert len(layers) == 18
    for name in layers:
        assert found[name].kind == expected[name].kind
        assert found[name].data.tobytes() == expected[name].data.tobytes(), name


@pytest.mark.model
@pytest.mark.parametrize(
    ("quantization", "num_layers", "bound"),
    [pytest.param("Q4_0", 30, 1.5, marks=pytest.mark.slow), ("F16", 2, 1e-3)],
)
def test_the_demo_model_stays_what_it_is(
    quantization: str,
    num_layers: int,
    bound: float,
    demo_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the text's beginning; docs/results.md has the figures for all of it."""
    beginning = parity.parity_text()[:150]
    monkeypatch.setattr(parity, "parity_text", lambda: beginning)
    source = open_checkpoint(demo_gguf)
    try:
        report = write(
            source, tmp_path / "out.gguf", quantization, check=True, num_layers=num_layers
        )
        written = open_checkpoint(tmp_path / "out.gguf")
        assert written.tokenizer_json() == source.tokenizer_json()
        name = f"model.layers.{num_layers - 1}.mlp.down_proj.weight"
        assert written.tensors[name].kind.name == quantization
    finally:
        (tmp_path / "out.gguf").unlink(missing_ok=True)  # 270 MB that pytest would keep
    assert 0 < report.parity["kl_divergence"] < bound
    assert report.parity["perplexity"] < 2 * report.parity["source_perplexity"]
