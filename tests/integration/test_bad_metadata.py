"""Complete files whose content makes no model, or one that would silently run wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.errors import EdgeSpecError, ModelFileError, UnsupportedModelError
from edge_spec.exporters.gguf_model_info import open_model_info

Refusal = Callable[..., EdgeSpecError]
pytestmark = pytest.mark.usefixtures("bounded_memory")
U32_MAX = 2**32 - 1


@pytest.fixture
def directory(tiny: ModuleType, tmp_path: Path) -> Path:
    return Path(tiny.write_hf(tiny.build(), tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BAD_CONFIG = {
    "another architecture": {"model_type": "internlm2"},
    "no architecture": {"model_type": None},
    "another scaling": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "an mlp bias": {"mlp_bias": True},
    "fewer layers than there are": {"num_hidden_layers": 1},
    "more layers than there are": {"num_hidden_layers": 3},
    "a great many layers": {"num_hidden_layers": 10**12},
    "no layers": {"num_hidden_layers": 0},
    "layers in words": {"num_hidden_layers": "two"},
    "another width": {"hidden_size": 96},
    "no width": {"hidden_size": None},
    "no heads": {"num_attention_heads": 0},
    "an endless context": {"max_position_embeddings": float("inf")},
    "no context": {"max_position_embeddings": 0},
    "another vocabulary": {"vocab_size": 300},
    "an epsilon that is none": {"rms_norm_eps": float("nan")},
    "a base in words": {"rope_theta": "many"},
    "a negative base": {"rope_theta": -1.0},
    "scaling in words": {"rope_scaling": "linear"},
    "scaling without factor": {"rope_scaling": {"rope_type": "linear"}},
    "scaling by nothing": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "an end in words": {"eos_token_id": "</s>"},
    "nested ends": {"eos_token_id": [[1], [2]]},
    "a beginning in words": {"bos_token_id": "<s>"},
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_a_config_that_does_not_fit_is_refused(
    case: str, directory: Path, refusal: Refusal
) -> None:
    change(directory / "config.json", **BAD_CONFIG[case])
    refusal(directory, str(directory))


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"],
)
def test_a_config_that_lacks_a_count_says_which(
    key: str, directory: Path, refusal: Refusal
) -> None:
    values = json.loads((directory / "config.json").read_text())
    del values[key]
    (directory / "config.json").write_text(json.dumps(values))
    assert key in str(refusal(directory, "config.json"))


def set_value(path: Path, key: str, value: bytes) -> None:
    """Overwrites a metadata value; its type stays."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("llama.block_count", count) for count in (0, 1, 3, 100_000, U32_MAX)),
        *(("llama.attention.head_count", count) for count in (0, 3, 2**20, U32_MAX)),
        *(("llama.attention.head_count_kv", count) for count in (3, U32_MAX)),
        *(("llama.attention.key_length", count) for count in (15, 32, U32_MAX)),
        *(("llama.context_length", count) for count in (0, U32_MAX)),
        *(("llama.embedding_length", count) for count in (0, 32, U32_MAX)),
        *(("llama.attention.layer_norm_rms_epsilon", value) for value in (float("nan"), -1.0)),
        *(("llama.rope.freq_base", value) for value in (float("nan"), float("inf"), -2.0)),
        ("llama.rope.dimension_count", 8),  # only half of each head is rotated
    ],
)
def test_a_gguf_value_that_does_not_fit_is_refused(
    key: str, value: float, tiny: ModuleType, tmp_path: Path, refusal: Refusal
) -> None:
    path = tiny.write_gguf(tiny.build(), tmp_path / "model.gguf")
    set_value(path, key, struct.pack("<I" if isinstance(value, int) else "<f", value))
    refusal(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("internlm2.context_length", count) for count in (0, 2**24 + 1, U32_MAX)),
        *((f"internlm2.{key}", U32_MAX) for key in ("block_count", "attention.head_count")),
    ],
)
def test_a_value_of_an_architecture_that_only_a_library_knows_is_bounded_too(
    key: str, value: int, tiny: ModuleType, tmp_path: Path
) -> None:
    path = tiny.write_gguf(tiny.build(model_type="internlm2"), tmp_path / "model.gguf")
    open_model_info(path)
    set_value(path, key, struct.pack("<I", value))
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        open_model_info(path)


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("odd", [{"num_key_value_heads": 3}, {"head_dim": 15}], ids=str)
def test_heads_that_cannot_be_are_refused_though_every_tensor_fits(
    form: str, odd: dict[str, int], tiny: ModuleType, tmp_path: Path, refusal: Refusal
) -> None:
    model = tiny.build("qwen2", **odd)
    assert isinstance(
        refusal(getattr(tiny, f"write_{form}")(model, tmp_path / "model")), ModelFileError
    )


@pytest.mark.parametrize("architecture", ["internlm2", "mamba"])
def test_another_architecture_is_named_with_the_supported_ones(
    architecture: str, tiny: ModuleType, tmp_path: Path, refusal: Refusal
) -> None:
    path = tmp_path / "model.gguf"
    tiny.write_gguf(tiny.build(), path, general__architecture=architecture)
    error = refusal(path)
    assert isinstance(error, UnsupportedModelError)
    assert repr(architecture) in str(error)
    assert "llama, qwen2, qwen3" in str(error)


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"],
)
@pytest.mark.parametrize("damage", ["missing", "wrong shape"])
def test_a_tensor_that_does_not_fit_is_named(
    form: str, name: str, damage: str, tiny: ModuleType, tmp_path: Path, refusal: Refusal
) -> None:
    model = tiny.build()
    values = model.weights.pop(name)
    if damage == "wrong shape":
        model.weights[name] = np.concatenate([values, values], axis=-1)
    path = getattr(tiny, f"write_{form}")(model, tmp_path / "model")
    error = refusal(path)
    assert isinstance(error, ModelFileError)
    assert name in str(error) or tiny.gguf_name(name) in str(error)


@pytest.mark.parametrize(
    "name", ["self_attn.q_norm.weight", "post_attention_norm.weight", "mlp.experts.weight"]
)
@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_weights_that_would_be_left_out_are_refused(
    form: str,
    name: str,
    tiny: ModuleType,
    tmp_path: Path,
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of a related kind would run without them, and answer nonsense."""
    model = tiny.build()
    model.weights[f"model.layers.1.{name}"] = np.ones(16, np.float32)
    plain = tiny.gguf_name
    monkeypatch.setattr(
        tiny,
        "gguf_name",
        lambda full: f"blk.1.{name}" if full.endswith(name) else plain(full),
    )
    path = getattr(tiny, f"write_{form}")(model, tmp_path / "model")
    error = refusal(path)
    assert isinstance(error, UnsupportedModelError)
    assert name in str(error)


@pytest.mark.parametrize("factors", [np.ones(1), np.ones(9), np.ones((2, 8)), np.zeros(8)])
def test_rope_factors_that_do_not_fit_are_refused(
    factors: np.ndarray,
    tiny: ModuleType,
    tmp_path: Path,
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny, "_rope_factors", lambda config: factors.astype(np.float32))
    refusal(tiny.write_gguf(tiny.build(), tmp_path / "model.gguf"))


def test_a_vocabulary_larger_than_the_embeddings_is_refused(
    tiny: ModuleType, tmp_path: Path, refusal: Refusal
) -> None:
    """Its last tokens would have no row in the embeddings."""
    model = tiny.build(vocab_size=len(tiny.TOKENS) - 1)
    refusal(tiny.write_gguf(model, tmp_path / "model.gguf"))
