"""Exported GGUF files hold the weights of their source and what it says of itself, and llama.cpp
scores them as it does."""

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
from fixtures.silence import quiet

# Of random weights rounding takes this part of the norm, measured; a shuffled row takes 140 %.
ROUNDING = {"Q2_K": 0.5, "Q3_K": 0.25, "Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.03}

Paths = Callable[..., Path]
Tokens = Callable[..., list[int]]


def write(
    checkpoint: StoredCheckpoint,
    out: Path,
    quantization: str | None = "F32",
    progress: Progress = quiet,
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


@pytest.mark.parametrize(
    ("variant", "quantization"), each(list(tiny_models.VARIANTS), ["F32", "F16", "Q8_0"])
)
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
    quantize(converted("llama", "F32"), tmp_path / "out.gguf", file_type, quiet)
    expected = GgufFile(tmp_path / "out.gguf").tensors
    found = GgufFile(converted("llama", quantization)).tensors
    layers = [name for name in expected if name.startswith("blk.")]
    assert len(layers) == 18
    for name in layers:
        assert found[name].kind == expected[name].kind
        assert found[name].data.tobytes() == expected[name].data.tobytes(), name


@pytest.fixture(scope="session")
def wide(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    """A model with rows of 256, which K-quants need."""
    model = tiny.build(hidden_size=256, intermediate_size=512, head_dim=64)
    directory = tmp_path_factory.mktemp("wide") / "wide"
    return open_checkpoint(tiny.write_hf(model, directory))


@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_k_quants_hold_the_weights_but_for_rounding(
    quantization: str, wide: StoredCheckpoint, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    write(wide, tmp_path / "out.gguf", quantization)
    written = open_checkpoint(tmp_path / "out.gguf")
    kinds = set()
    for name in wide.names():
        error = relative_error(written.float32(name), wide.float32(name))
        kind = written.tensors[name].kind.name
        assert error <= (0.0 if kind == "F32" else ROUNDING[kind]), name
        kinds.add(kind)
    assert f"Q{quantization[1]}_K" in kinds
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("quantization", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3", "llama-llama3"])
def test_what_has_the_type_already_is_carried_over_bit_for_bit(
    variant: str, quantization: str, gguf: Paths, tmp_path: Path
) -> None:
    """From a file that another writer made, in llama.cpp's row order."""
    source = gguf(variant, quantization)
    write(open_checkpoint(source), tmp_path / "out.gguf", quantization)
    before, after = GgufFile(source).tensors, GgufFile(tmp_path / "out.gguf").tensors
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].kind == tensor.kind
        assert after[name].data.tobytes() == tensor.data.tobytes(), name


def test_what_a_file_says_of_its_tokenizer_and_origin_is_kept(
    tiny: ModuleType, tmp_path: Path
) -> None:
    extras = {
        "general__license": "apache-2.0",
        "general__name": "Tiny of someone",
        "tokenizer__ggml__unheard_of": "kept",
        "llama__unheard_of": "dropped: it may not hold for the new file",
    }
    source = tiny.write_gguf(tiny.build(), tmp_path / "in.gguf", **extras)
    write(open_checkpoint(source), tmp_path / "out.gguf", "Q8_0")
    before, after = GgufFile(source), GgufFile(tmp_path / "out.gguf")
    kept = {key for key in before.metadata if key.startswith("tokenizer.")}
    assert len(kept) == 10
    for key in kept | {"general.license", "general.name"}:
        np.testing.assert_equal(after.metadata[key], before.metadata[key], err_msg=key)
        assert after.kinds[key] == before.kinds[key]
    assert "llama.unheard_of" not in after.metadata
    assert after.metadata["general.file_type"] == 7


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
    """On the beginning of the text; benchmarks/results/quantizations.json has all of it."""
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
