"""A model with a feature that is not computed is refused by the feature's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.errors import (
    ModelFileError,
    UnknownArchitectureError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.families import BY_MODEL_TYPE
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.truncate import first_layers
from edge_spec.models import runtimes
from fixtures import families
from fixtures import tiny_models as tiny
from fixtures.family_gguf import write_gguf

LACKED = {
    "multi-head latent attention": {"kv_lora_rank": 16},
    "the activation 'relu2'": {"hidden_act": "relu2"},
    "biases in its MLPs": {"mlp_bias": True},
    "a mixture of experts": {"num_local_experts": 4},
    "layers of 'linear_attention'": {"layer_types": ["linear_attention", "full_attention"]},
    "layers of 'conv'": {"layer_types": ["conv", "full_attention"]},
    "attention in chunks": {"attention_chunk_size": 8},
    "'dynamic'": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}


@pytest.mark.parametrize("feature", LACKED)
@pytest.mark.parametrize("family", ["granite", "llama", "phi3"])
def test_a_feature_that_is_not_computed_is_named_before_weights_are_read(
    feature: str, family: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    if family == "llama":
        tiny.write_hf(tiny.build(), directory)
    else:
        families.write_hf(family, directory)
    change(directory, **LACKED[feature])
    if "rope" not in str(LACKED[feature]):
        (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError) as refused:
        open_checkpoint(directory)
    assert feature in str(refused.value) and "\n" not in str(refused.value)


def test_a_window_that_is_asked_of_smollm3_is_named(tmp_path: Path) -> None:
    directory = families.write_hf("smollm3", tmp_path / "model", use_sliding_window=True)
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        open_checkpoint(directory)


def test_biases_of_convolutions_are_named_before_weights_are_read(tmp_path: Path) -> None:
    directory = families.write_hf("lfm2", tmp_path / "model", conv_bias=True)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="biases in its convolutions"):
        open_checkpoint(directory)


@pytest.mark.parametrize("kernel", [0, 1, 65, 10**9])
def test_a_convolution_of_rows_that_none_has_is_refused(kernel: int, tmp_path: Path) -> None:
    directory = families.write_hf("lfm2", tmp_path / "model", conv_L_cache=kernel)
    with pytest.raises(ModelFileError, match=f"its convolutions take in {kernel} rows"):
        open_checkpoint(directory)


def test_a_model_of_convolutions_alone_is_refused(tmp_path: Path) -> None:
    directory = families.write_hf("lfm2", tmp_path / "model", layer_types=["conv"] * 6)
    with pytest.raises(ModelFileError, match="none of its layers attends"):
        open_checkpoint(directory)


def test_a_draft_of_its_first_layers_keeps_one_with_attention(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(families.write_hf("lfm2", tmp_path / "model"))
    assert first_layers(checkpoint, 2).config.attending == (1,)
    with pytest.raises(UsageError) as refused:
        first_layers(checkpoint, 1)
    assert refused.value.remedy == "Choose 2 to 6."


@pytest.mark.parametrize(
    ("name", "changes", "feature"),
    [
        ("qwen3moe", {"mlp_only_layers": [1]}, "experts in some layers alone"),
        ("qwen3moe", {"decoder_sparse_step": 2}, "experts in some layers alone"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "a slope of 1.5"),
    ],
)
def test_experts_of_another_kind_are_named(
    name: str, changes: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    directory = families.write_hf(name, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError, match=feature):
        open_checkpoint(directory)


def test_more_experts_than_a_file_has_are_refused_by_their_number(tmp_path: Path) -> None:
    """Before a name is made for each of them."""
    directory = families.write_hf("qwen3moe", tmp_path / "model", num_local_experts=10**12)
    with pytest.raises(ModelFileError, match=r"a count of more than|experts a layer, but"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_dense_layers": 7}, "it has 7 layers without experts"),
        ({"num_dense_layers": -1}, "it has -1 layers without experts"),
        ({"intermediate_size": 0}, "without experts have a width of 0"),
        ({"routed_scaling_factor": 0}, "scales or caps by what is no positive number"),
        ({"num_experts_per_tok": 7}, "take 7 of 6 experts"),
        ({"num_experts": 7}, "expert_bias has the shape"),
        ({"use_expert_bias": False}, "expert_bias"),
        ({"num_dense_layers": 1}, "layers.1.mlp"),
        ({"num_dense_layers": 3}, "layers.2.mlp"),
    ],
)
def test_experts_beside_dense_layers_that_do_not_fit_are_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    directory = families.write_hf("lfm2moe", tmp_path / "model", **changes)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=problem):
        open_checkpoint(directory)


def test_a_file_whose_experts_are_weighed_in_another_way_is_refused(tmp_path: Path) -> None:
    path = write_gguf("lfm2moe", tmp_path / "model.gguf", gating=1)
    with pytest.raises(UnsupportedModelError, match="by the function 1, not by a sigmoid"):
        open_checkpoint(path)


def test_packed_experts_without_their_scales_are_damaged(tmp_path: Path) -> None:
    directory = families.write_hf("gpt-oss", tmp_path / "model")
    stored = {
        name: ("U8" if values.dtype == np.uint8 else "F32", values)
        for name, values in families.load("gpt-oss").weights.items()
        if name != "model.layers.3.mlp.experts.down_proj_scales"
    }
    (directory / "model.safetensors").write_bytes(tiny.safetensors(stored))
    with pytest.raises(ModelFileError, match=r"3\.mlp\.experts\.down_proj_blocks has no scale"):
        open_checkpoint(directory)


def test_experts_whose_rows_end_within_a_block_are_not_quantized(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(families.write_hf("qwen3moe", tmp_path / "model"))
    options = ExportOptions(quantization="int4", block_size=128)
    with pytest.raises(UnsupportedModelError, match="blocks of 128"):
        OnnxExporter().export(checkpoint, tmp_path / "out", options, lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_an_unknown_family_says_what_it_has_besides(tmp_path: Path) -> None:
    """As minicpm3, which is not minicpm."""
    directory = families.write_hf("granite", tmp_path / "model")
    change(directory, model_type="minicpm3", q_lora_rank=8)
    with pytest.raises(UnknownArchitectureError, match=r"minicpm3.*latent attention") as refused:
        open_checkpoint(directory)
    assert refused.value.remedy is not None
    told = refused.value.remedy.removeprefix("Readable: ").partition(". ")[0]
    assert {name.partition(" (")[0] for name in told.split(", ")} == set(BY_MODEL_TYPE)
    assert "granitemoehybrid (dense without Mamba)" in told


def test_what_is_told_of_a_model_type_is_told_of_one_that_is_read() -> None:
    for name, family in BY_MODEL_TYPE.items():
        assert set(family.limits) <= set(family.model_types), name


BROKEN = {
    "scale": {"embedding_multiplier": float("nan")},
    "no scale": {"logits_scaling": 0.0},
    "scale in words": {"residual_multiplier": "small"},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_multiplier_that_is_no_number_is_refused(case: str, tmp_path: Path) -> None:
    directory = families.write_hf("granite", tmp_path / "model", **BROKEN[case])
    with pytest.raises(ModelFileError):
        open_checkpoint(directory)


LAYERS: dict[str, dict[str, Any]] = {
    "fewer kinds than layers": {"layer_types": ["full_attention"] * 3},
    "a window of nothing": {"sliding_window": 0},
    "a window in words": {"sliding_window": "many"},
    "more layers than tensors": {"num_hidden_layers": 10**9, "layer_types": None},
    "no pattern": {"layer_types": 7},
}


@pytest.mark.parametrize("case", LAYERS)
def test_windows_that_cannot_be_are_refused(case: str, tmp_path: Path) -> None:
    directory = families.write_hf("gemma3", tmp_path / "model", **LAYERS[case])
    with pytest.raises(ModelFileError):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("model.layers.0.conv.conv.weight", [64, 1, 4], "has the shape [64, 4], expected [64, 3]"),
        ("model.layers.0.conv.conv.weight", [64, 2, 3], "has the shape [64, 2, 3]"),
        ("model.layers.1.conv.in_proj.weight", [192, 64], "does not use, such as"),
        ("model.layers.0.self_attn.q_proj.weight", [64, 64], "does not use, such as"),
    ],
)
def test_a_convolution_of_another_shape_or_in_another_layer_is_named(
    name: str, shape: list[int], problem: str, tmp_path: Path
) -> None:
    require_named("lfm2", name, shape, problem, tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("model.layers.1.self_attn.sinks", [4], "does not use, such as"),
        ("model.decoder.weight", [4, 4], "does not use, such as"),
        ("model.layers.1.mlp.gate_up_proj.weight", [90, 64], "has 90 rows, expected 96"),
        ("model.layers.1.post_attention_layernorm.weight", [63], "expected"),
    ],
)
def test_a_tensor_too_many_or_of_another_shape_is_named(
    name: str, shape: list[int], problem: str, tmp_path: Path
) -> None:
    require_named("phi3", name, shape, problem, tmp_path)


def require_named(family: str, name: str, shape: list[int], problem: str, tmp_path: Path) -> None:
    """A tensor of this shape is refused by its name."""
    directory = families.write_hf(family, tmp_path / "model")
    weights = families.load(family).weights | {name: np.ones(shape, np.float32)}
    stored = {tensor: ("F32", values) for tensor, values in weights.items()}
    (directory / "model.safetensors").write_bytes(tiny.safetensors(stored))
    with pytest.raises((ModelFileError, UnsupportedModelError)) as refused:
        open_checkpoint(directory)
    assert name in str(refused.value) and problem in str(refused.value)


def test_the_gguf_exporter_names_what_it_does_not_write(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(families.write_hf("gemma3", tmp_path / "model"))
    exporter = runtimes.load_exporter("gguf")
    with pytest.raises(UnsupportedModelError, match=r"layer kinds, .*norm places"):
        exporter.export(checkpoint, tmp_path / "out", ExportOptions(), lambda what, done: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gemma3", "phi3", "lfm2"])
def test_a_gguf_file_with_a_tensor_too_many_is_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf(name, tmp_path / "model.gguf", {"blk.1.attn_sinks.weight": np.ones(4, "f4")})
    with pytest.raises(UnsupportedModelError, match="attn_sinks"):
        open_checkpoint(path)


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
