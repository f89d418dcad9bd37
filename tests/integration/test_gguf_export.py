"""Exported GGUF files hold the weights of their source, and llama.cpp scores them as it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from edge_spec.exporters.gguf import GgufExporter, kquants
from edge_spec.exporters.gguf.tensors import gguf_name
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.truncate import first_layers
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import tiny_models
from fixtures.axes import each_first

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


@pytest.mark.parametrize(("variant", "quantization"), each_first(VARIANTS, list(ROUNDING)))
def test_weights_are_those_of_the_source_but_for_rounding(
    variant: str, quantization: str, converted: Paths, checkpoint: Callable[..., StoredCheckpoint]
) -> None:
    source, written = checkpoint(variant), open_checkpoint(converted(variant, quantization))
    assert list(written.names()) == list(source.names())
    for name in source.names():
        kind = written.tensors[name].kind.name
        outer = name in ("model.embed_tokens.weight", "lm_head.weight")
        if source.tensors[name].shape[1:] == ():
            assert kind == "F32"
        else:
            assert kind == ("Q8_0" if quantization.startswith("Q") and outer else quantization)
        error = relative_error(written.float32(name), source.float32(name))
        assert error <= ROUNDING[kind], name
        assert (error == 0) == (ROUNDING[kind] == 0), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_dimensions_are_those_of_the_source(
    variant: str, converted: Paths, checkpoint: Callable[..., StoredCheckpoint]
) -> None:
    source, written = checkpoint(variant), open_checkpoint(converted(variant))
    architecture = "llama" if variant == "mistral" else source.config.architecture
    expected = replace(source.config, architecture=architecture, rope_scaling=None)
    epsilon = pytest.approx(expected.norm_epsilon, rel=1e-6)  # stored as float32
    assert written.config.norm_epsilon == epsilon
    found = replace(written.config, norm_epsilon=expected.norm_epsilon, rope_scaling=None)
    assert found == expected
    np.testing.assert_allclose(
        written.config.rope_frequencies(), source.config.rope_frequencies(), rtol=1e-6
    )
    assert written.eos_ids == source.eos_ids
    assert written.bos_id == source.bos_id
    assert written.adds_bos == source.adds_bos
    assert written.chat_template == source.chat_template


@pytest.mark.parametrize(("variant", "quantization"), each_first(VARIANTS, ["F32", "F16", "Q8_0"]))
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


@pytest.mark.parametrize(
    ("kind", "quantization"), each_first(["F16", "BF16", "Q4_1", "Q5_0", "Q8_0"], ["F32", "Q4_0"])
)
def test_any_stored_type_is_exported_in_any_other(
    quantization: str, kind: str, gguf: Paths, tmp_path: Path
) -> None:
    source = open_checkpoint(gguf("llama", kind))
    write(source, tmp_path / "out.gguf", quantization)
    written = open_checkpoint(tmp_path / "out.gguf")
    for name in source.names():
        error = relative_error(written.float32(name), source.float32(name))
        assert error <= ROUNDING[written.tensors[name].kind.name], name


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


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0"])
def test_pruned_weights_stay_nothing(quantization: str, tiny: ModuleType, tmp_path: Path) -> None:
    """The inverse of such a block's scale is beyond float32."""
    model = tiny.build()
    name = "model.layers.0.mlp.up_proj.weight"
    model.weights[name][:, :32] = 1e-39
    model.weights[name][0] = 0
    write(open_checkpoint(tiny.write_hf(model, tmp_path / "in")), tmp_path / "out", quantization)
    written = open_checkpoint(tmp_path / "out").float32(name)
    assert np.abs(written[:, :32]).max() < 1e-30
    assert not written[0].any()


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


@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_only_the_first_layers_are_written(
    source: str,
    tmp_path: Path,
    tokens: Tokens,
    open_llama: Callable[..., LlamaCppModel],
    request: pytest.FixtureRequest,
) -> None:
    pytest.importorskip("llama_cpp")
    whole = open_checkpoint(request.getfixturevalue(source)("llama-tied"))
    write(whole, tmp_path / "out.gguf", num_layers=1)
    assert open_checkpoint(tmp_path / "out.gguf").config.num_layers == 1
    text = tokens(40)
    model = open_llama("llamacpp", tmp_path / "out.gguf", kv_type="f32", flash_attention=False)
    found = parity.score_text(model, text)
    model.close()
    expected = parity.score_text(ReferenceModel(first_layers(whole, 1)), text)
    assert relative_error(found, expected) < 1e-3


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_those_that_llama_cpp_makes(
    quantization: str, converted: Paths, tmp_path: Path
) -> None:
    """But for the embedding, to which it gives as few bits as to the layers."""
    pytest.importorskip("llama_cpp")
    file_type = LlamaFileType[f"MOSTLY_{quantization}"]
    kquants.quantize(converted("llama", "F32"), tmp_path / "out.gguf", file_type, silent)
    expected = GgufFile(tmp_path / "out.gguf").tensors
    found = GgufFile(converted("llama", quantization)).tensors
    layers = [name for name in expected if name.startswith("blk.")]
    assert len(layers) == 18
    for name in layers:
        assert found[name].kind == expected[name].kind
        assert found[name].data.tobytes() == expected[name].data.tobytes(), name


def test_names_are_those_of_llama_cpp(tiny: ModuleType) -> None:
    for variant in ("llama-bias", "qwen2", "qwen3"):
        for name in tiny.build(variant).weights:
            assert gguf_name(name) == tiny.gguf_name(name)


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
    """On the text's beginning; docs/benchmarks.md has the figures for all of it."""
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
