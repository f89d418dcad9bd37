"""Complete files whose content makes no model, or one that would silently run wrong: each is
refused in one line that names what is wrong, before weights are read where config.json says it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
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
from edge_spec.exporters.checkpoint import first_layers
from edge_spec.exporters.families import BY_MODEL_TYPE
from edge_spec.exporters.gguf_model_info import GgufModelInfo, open_model_info
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from fixtures import families
from fixtures import tiny_models as tiny
from fixtures.family_gguf import write_gguf

Make = Callable[[Path], Path]  # writes a model into a folder and says what to open
pytestmark = pytest.mark.usefixtures("bounded_memory")
U32_MAX = 2**32 - 1
NAN, INF = float("nan"), float("inf")


def directory(family: str, folder: Path) -> Path:
    """A Hugging Face directory of a family's fixture, or of tiny_models' llama."""
    path = folder / "model"
    return (
        tiny.write_hf(tiny.build(), path) if family == "llama" else families.write_hf(family, path)
    )


def stating(family: str, weights: bool = True, **changes: Any) -> Make:
    """config.json states something else, where None takes a key away; weights: are beside it."""

    def make(folder: Path) -> Path:
        path = directory(family, folder)
        values = json.loads((path / "config.json").read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))
        if not weights:
            (path / "model.safetensors").unlink()
        return path

    return make


def lacking(family: str, **changes: Any) -> Make:
    """As `stating`, of what is named before the weights, which are not there, are read."""
    return stating(family, weights=False, **changes)


def holding(family: str, name: str, *shape: int) -> Make:
    """A tensor of this name has this shape, or is one too many."""

    def make(folder: Path) -> Path:
        path = directory(family, folder)
        weights = families.load(family).weights | {name: np.ones(shape, np.float32)}
        stored = {tensor: ("F32", values) for tensor, values in weights.items()}
        (path / "model.safetensors").write_bytes(tiny.safetensors(stored))
        return path

    return make


def built(
    form: str,
    changed: Callable[[dict[str, np.ndarray]], object] = id,
    variant: str = "llama",
    metadata: dict[str, str] | None = None,
    **odd: Any,
) -> Make:
    """A model of tiny_models with odd sizes, metadata of its GGUF file, or changed tensors."""

    def make(folder: Path) -> Path:
        model = tiny.build(variant, **odd)
        changed(model.weights)
        path: Path = getattr(tiny, f"write_{form}")(model, folder / "model", **(metadata or {}))
        return path

    return make


def adding(name: str, *shape: int) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda weights: weights.update({name: np.ones(shape or 16, np.float32)})


def removing(name: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda weights: weights.pop(name)


def doubling(name: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda weights: weights.update({name: np.concatenate([weights[name]] * 2, axis=-1)})


def replaced(key: str, value: float, architecture: str | None = None) -> Make:
    """A GGUF file with another value in its metadata, of the same type."""

    def make(folder: Path) -> Path:
        changes = {} if architecture is None else {"model_type": architecture}
        path = tiny.write_gguf(tiny.build(**changes), folder / "model.gguf")
        data = bytearray(path.read_bytes())
        at = data.index(key.encode()) + len(key) + 4
        data[at : at + 4] = struct.pack("<I" if isinstance(value, int) else "<f", value)
        path.write_bytes(data)
        return path

    return make


def family_file(family: str, *added: Any, **changes: Any) -> Make:
    return lambda folder: write_gguf(family, folder / "model.gguf", *added, **changes)


def without_scales(folder: Path) -> Path:
    path = directory("gpt-oss", folder)
    stored = {
        name: ("U8" if values.dtype == np.uint8 else "F32", values)
        for name, values in families.load("gpt-oss").weights.items()
        if name != "model.layers.3.mlp.experts.down_proj_scales"
    }
    (path / "model.safetensors").write_bytes(tiny.safetensors(stored))
    return path


Refusal = Callable[..., Exception]
CONVOLUTION = "model.layers.0.conv.conv.weight"
UNSUPPORTED: list[tuple[str, Make]] = [  # what the line says, and of which model
    *(
        (feature, lacking("llama", **said))
        for feature, said in {
            "multi-head latent attention": {"kv_lora_rank": 16},
            "the activation 'relu2'": {"hidden_act": "relu2"},
            "biases in its MLPs": {"mlp_bias": True},
            "a mixture of experts": {"num_local_experts": 4},
            "layers of 'linear_attention'": {"layer_types": ["linear_attention", "full_attention"]},
            "layers of 'conv'": {"layer_types": ["conv", "full_attention"]},
            "attention in chunks": {"attention_chunk_size": 8},
        }.items()
    ),
    ("'dynamic'", stating("phi3", rope_scaling={"rope_type": "dynamic", "factor": 2.0})),
    ("sliding window", stating("smollm3", use_sliding_window=True)),
    ("biases in its convolutions", lacking("lfm2", conv_bias=True)),
    ("later tokens", lacking("gemma4", use_bidirectional_attention="all")),
    ("experts in some layers alone", stating("qwen3moe", mlp_only_layers=[1])),
    ("a slope of 1.5", stating("gpt-oss", swiglu_alpha=1.5)),
    ("by the function 1, not by a sigmoid", family_file("lfm2moe", gating=1)),
    *(
        ("attn_sinks", family_file(name, {"blk.1.attn_sinks.weight": np.ones(4, "f4")}))
        for name in ("gemma3", "phi3", "lfm2")
    ),
    *(
        (f"does not use, such as {name}", holding(family, name, *shape))
        for family, name, *shape in (
            ("lfm2", "model.layers.1.conv.in_proj.weight", 192, 64),
            ("lfm2", "model.layers.0.self_attn.q_proj.weight", 64, 64),
            ("phi3", "model.layers.1.self_attn.sinks", 4),
            ("phi3", "model.decoder.weight", 4, 4),
        )
    ),
    *(
        (f"{name!r}", built("gguf", metadata={"general__architecture": name}))
        for name in ("internlm2", "mamba")
    ),
    ("expert_bias", stating("lfm2moe", use_expert_bias=False)),
    ("layers.1.mlp", stating("lfm2moe", num_dense_layers=1)),
    # A model of a related kind would run without them, and answer nonsense.
    *(
        (name, built(form, adding(f"model.layers.1.{name}")))
        for form, name in (
            ("hf", "self_attn.q_norm.weight"),
            ("gguf", "self_attn.q_norm.weight"),
            ("hf", "post_attention_norm.weight"),
            ("hf", "mlp.experts.weight"),
        )
    ),
]
BROKEN: list[tuple[str, Make]] = [
    *(
        (f"its convolutions take in {rows} rows", stating("lfm2", conv_L_cache=rows))
        for rows in (0, 1, 65, 10**9)
    ),
    ("none of its layers attends", stating("lfm2", layer_types=["conv"] * 6)),
    ("experts", stating("qwen3moe", num_local_experts=10**12)),  # before each gets a name
    ("it has 7 layers without experts", stating("lfm2moe", num_dense_layers=7)),
    ("scales or caps by what is no positive", stating("lfm2moe", routed_scaling_factor=0)),
    ("take 7 of 6 experts", stating("lfm2moe", num_experts_per_tok=7)),
    ("expert_bias has the shape", stating("lfm2moe", num_experts=7)),
    ("lacks a valid value: 'num_experts'", stating("gemma4-experts", num_experts=None)),
    ("3.mlp.experts.down_proj_blocks has no scale", without_scales),
    (f"{CONVOLUTION} has the shape [64, 4]", holding("lfm2", CONVOLUTION, 64, 1, 4)),
    (f"{CONVOLUTION} has the shape [64, 2, 3]", holding("lfm2", CONVOLUTION, 64, 2, 3)),
    ("has 90 rows, expected 96", holding("phi3", "model.layers.1.mlp.gate_up_proj.weight", 90, 64)),
    *(
        ("", stating("granite", **{key: value}))
        for key, value in {
            "embedding_multiplier": NAN,
            "logits_scaling": 0.0,
            "residual_multiplier": "small",
        }.items()
    ),
    *(
        ("", stating("gemma3", **changes))
        for changes in (
            {"layer_types": ["full_attention"] * 3},
            {"layer_types": 7},
            {"sliding_window": 0},
            {"sliding_window": "many"},
            {"num_hidden_layers": 10**9, "layer_types": None},
        )
    ),
    *(
        (key, stating("llama", **{key: None}))
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
    ),
    *(
        ("", built(form, variant="qwen2", **odd))
        for form in ("hf", "gguf")
        for odd in ({"num_key_value_heads": 3}, {"head_dim": 15})
    ),
    *(
        (name.removeprefix("model."), built(form, changed(name)))
        for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight")
        for form in ("hf", "gguf")
        for changed in (removing, doubling)
    ),
    *(
        (
            "embd" if (form, changed) == ("gguf", removing) else "embed",
            built(form, changed("model.embed_tokens.weight")),
        )
        for form in ("hf", "gguf")
        for changed in (removing, doubling)
    ),
]
# Of which some are damaged and some not supported: one line, whichever it is.
REFUSED: list[Make] = [
    *(
        stating("llama", **{key: value})
        for key, values in {
            "model_type": ["internlm2"],
            "rope_scaling": [
                "linear",
                {"rope_type": "linear"},
                {"rope_type": "linear", "factor": 0},
            ],
            "num_hidden_layers": [1, 3, 10**12, 0, "two"],
            "hidden_size": [96],
            "num_attention_heads": [0, 10**4200],
            "max_position_embeddings": [INF, 0],
            "vocab_size": [300],
            "rms_norm_eps": [NAN],
            "rope_theta": ["many", -1.0],
            "eos_token_id": ["</s>", [[1], [2]]],
            "bos_token_id": ["<s>"],
        }.items()
        for value in values
    ),
    stating("llama", model_type=None),
    *(
        replaced(f"llama.{key}", value)
        for key, values in {
            "block_count": [0, 1, 3, 100_000, U32_MAX],
            "attention.head_count": [0, 3, 2**20, U32_MAX],
            "attention.head_count_kv": [3, U32_MAX],
            "attention.key_length": [15, 32, U32_MAX],
            "context_length": [0, U32_MAX],
            "embedding_length": [0, 32, U32_MAX],
            "attention.layer_norm_rms_epsilon": [NAN, -1.0],
            "rope.freq_base": [NAN, INF, -2.0],
            "rope.dimension_count": [8],  # only half of each head is rotated
        }.items()
        for value in values
    ),
    built("gguf", vocab_size=len(tiny.TOKENS) - 1),  # its last tokens have no embedding
]


@pytest.mark.parametrize(("says", "make"), UNSUPPORTED)
def test_a_feature_that_is_not_computed_is_named(
    says: str, make: Make, refusal: Refusal, tmp_path: Path
) -> None:
    error = refusal(make(tmp_path))
    assert isinstance(error, UnsupportedModelError) and says in str(error)


@pytest.mark.parametrize(("says", "make"), BROKEN)
def test_what_makes_no_model_is_named(
    says: str, make: Make, refusal: Refusal, tmp_path: Path
) -> None:
    error = refusal(make(tmp_path))
    assert isinstance(error, ModelFileError) and says in str(error)


@pytest.mark.parametrize("make", REFUSED)
def test_values_that_do_not_fit_are_refused(make: Make, refusal: Refusal, tmp_path: Path) -> None:
    refusal(make(tmp_path))


@pytest.mark.parametrize("factors", [np.ones(1), np.ones(9), np.ones((2, 8)), np.zeros(8)])
def test_rope_factors_that_do_not_fit_are_refused(
    factors: np.ndarray, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_rope_factors", lambda config: factors.astype(np.float32))
    refusal(tiny.write_gguf(tiny.build(), tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("context_length", count) for count in (0, 2**24 + 1, U32_MAX)),
        *((key, U32_MAX) for key in ("block_count", "attention.head_count")),
    ],
)
def test_values_of_an_architecture_that_only_a_library_knows_are_bounded_too(
    key: str, value: int, tmp_path: Path
) -> None:
    path = replaced(f"internlm2.{key}", value, "internlm2")(tmp_path)
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        open_model_info(path)


def test_where_layers_of_such_an_architecture_differ_the_largest_counts(tmp_path: Path) -> None:
    """As memory is planned for."""
    model = tiny.build(model_type="internlm2")
    counts = {"internlm2__attention__head_count_kv": [1, 4]}
    info = open_model_info(tiny.write_gguf(model, tmp_path / "model.gguf", **counts))
    assert isinstance(info, GgufModelInfo)
    assert info.config.num_kv_heads == 4


def test_a_draft_of_its_first_layers_keeps_one_with_attention(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(families.write_hf("lfm2", tmp_path / "model"))
    assert first_layers(checkpoint, 2).config.attending == (1,)
    with pytest.raises(UsageError) as refused:
        first_layers(checkpoint, 1)
    assert refused.value.remedy == "Choose 2 to 6."


def test_experts_whose_rows_end_within_a_block_are_not_quantized(tmp_path: Path) -> None:
    inner = 24
    ends = {"gate_proj": np.s_[:inner], "up_proj": np.s_[:inner], "down_proj": np.s_[:, :inner]}
    weights = {
        name: each[ends[name.split(".")[-2]]] if ".experts." in name else each
        for name, each in families.load("qwen3moe").weights.items()
    }
    path = families.write_hf("qwen3moe", tmp_path / "model", weights, moe_intermediate_size=inner)
    checkpoint, options = open_checkpoint(path), ExportOptions(quantization="int4")
    with pytest.raises(UnsupportedModelError, match="rows of 24 weights are not whole blocks"):
        OnnxExporter().export(checkpoint, tmp_path / "out", options, lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_an_unknown_family_says_what_it_has_besides_and_what_is_readable(tmp_path: Path) -> None:
    """As minicpm3, which is not minicpm."""
    unknown = stating("granite", model_type="minicpm3", q_lora_rank=8)
    with pytest.raises(UnknownArchitectureError, match=r"minicpm3.*latent attention") as refused:
        open_checkpoint(unknown(tmp_path))
    assert refused.value.remedy is not None
    readable = refused.value.remedy.removeprefix("Readable: ").partition(". ")[0]
    assert set(readable.split(", ")) == set(BY_MODEL_TYPE)
