"""Benchmark targets made of a small model: identity blocks change nothing but the cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.parity import score_text
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import open_bundle
from edge_spec.runtimes.reference import ReferenceModel

Files = Callable[..., Path]
Tokens = Callable[..., list[int]]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stretched.py"
TIMES = 3


@pytest.fixture(scope="module")
def stretch() -> ModuleType:
    spec = spec_from_file_location("stretched", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def scores_of(
    checkpoint: StoredCheckpoint, format: str, quantization: str, out: Path
) -> np.ndarray:
    """Of 40 tokens, exported and run."""
    options = ExportOptions(quantization, check=False)
    exporter: Any = runtimes.load_exporter(format)
    exporter.export(checkpoint, out, options, lambda what, part: None)
    runtime = runtimes.load_runtime({"onnx": "ort", "gguf": "llamacpp"}[format])
    source = open_bundle(out) if format == "onnx" else runtimes.open_model_info(out)
    model = runtime.open(source, RuntimeOptions(threads=1))
    text = np.random.RandomState(0).randint(0, 262, 40).tolist()
    try:
        return score_text(model, text)
    finally:
        model.close()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_a_stretched_model_scores_as_the_model_itself(
    source: str,
    variant: str,
    at_end: bool,
    stretch: ModuleType,
    tokens: Tokens,
    request: pytest.FixtureRequest,
) -> None:
    checkpoint: Any = open_checkpoint(request.getfixturevalue(source)(variant))
    longer = stretch.stretched(checkpoint, TIMES, at_end)
    assert longer.config.num_layers == TIMES * checkpoint.config.num_layers
    found, expected = (
        score_text(ReferenceModel(model), tokens(40)) for model in (longer, checkpoint)
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("format", "quantization"),
    [("onnx", "int8"), ("onnx", "fp16"), ("gguf", "Q8_0"), ("gguf", "F16")],
)
def test_no_runtime_sees_a_difference_in_a_bit(
    format: str, quantization: str, gguf: Files, stretch: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "gguf": "llama_cpp"}[format])
    checkpoint = open_checkpoint(gguf("llama"))
    longer = stretch.stretched(checkpoint, TIMES)
    found, expected = (
        scores_of(model, format, quantization, tmp_path / name)
        for name, model in (("longer", longer), ("itself", checkpoint))
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("at_end", [False, True])
def test_original_blocks_stand_where_they_are_said_to(
    at_end: bool, hf: Files, stretch: ModuleType
) -> None:
    checkpoint = open_checkpoint(hf("llama"))
    longer = stretch.stretched(checkpoint, TIMES, at_end)
    written = [
        bool(longer.float32(f"model.layers.{layer}.mlp.down_proj.weight").any())
        for layer in range(longer.config.num_layers)
    ]
    rest = TIMES - 1
    interleaved = [True, *[False] * rest] * 2
    assert written == ([True, True, *[False] * 2 * rest] if at_end else interleaved)


def test_no_two_blocks_share_a_matrix(hf: Files, stretch: ModuleType) -> None:
    """A library that keeps equal matrices once would make the identity blocks cheap."""
    longer = stretch.stretched(open_checkpoint(hf("llama")), TIMES)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        stored = {
            longer.tensors[f"model.layers.{layer}.{part}.weight"].stored_rows().tobytes()
            for layer in range(longer.config.num_layers)
        }
        assert len(stored) == longer.config.num_layers, part


@pytest.mark.parametrize(("bits", "most_levels"), [(2, 4), (3, 8)])
def test_a_rounded_matrix_has_a_few_levels_in_each_block_and_is_near(
    bits: int, most_levels: int, stretch: ModuleType
) -> None:
    weights = np.random.RandomState(0).standard_normal((64, 64)).astype(np.float32)
    found = quants.dequantize(stretch.to_q4_0(weights, bits), Kind.Q4_0)
    blocks = found.reshape(-1, 32)
    assert max(len(np.unique(block)) for block in blocks) == most_levels
    low, high = (edge(weights.reshape(-1, 32), axis=1) for edge in (np.min, np.max))
    # A grid of 2 ** bits levels over the whole of a block's range, without clipping or refitting.
    step = ((high - low) / (most_levels - 1))[:, None]
    plain = np.rint((weights.reshape(-1, 32) - low[:, None]) / step) * step + low[:, None]
    plain_error, error = (
        ((grid - weights.reshape(-1, 32)) ** 2).mean() for grid in (plain, blocks)
    )
    assert error < plain_error


def test_a_draft_is_rounded_in_its_layers_alone(gguf: Files, stretch: ModuleType) -> None:
    checkpoint = open_checkpoint(gguf("llama"))
    rounded = stretch.rounded(checkpoint, 2)
    changed = {n for n in checkpoint.names() if rounded.tensors[n] is not checkpoint.tensors[n]}
    assert changed == {n for n in checkpoint.names() if n.endswith("proj.weight")}
    with pytest.raises(ValueError, match="5 bits"):
        stretch.rounded(checkpoint, 5)


def test_a_rounded_draft_scores_alike_in_both_formats(
    gguf: Files, stretch: ModuleType, tmp_path: Path
) -> None:
    """Both carry its Q4_0 blocks over; embedding and head differ in how they round to 8 bits."""
    pytest.importorskip("llama_cpp")
    rounded = stretch.rounded(open_checkpoint(gguf("llama")), 3)
    onnx = scores_of(rounded, "onnx", "int4", tmp_path / "onnx")
    gguf_scores = scores_of(rounded, "gguf", "Q4_0", tmp_path / "file.gguf")
    whole = scores_of(open_checkpoint(gguf("llama")), "onnx", "fp32", tmp_path / "whole")
    assert np.abs(onnx - gguf_scores).mean() < np.abs(onnx - whole).mean() / 3
