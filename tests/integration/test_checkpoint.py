"""A model means the same, whichever of the two published forms it is read from."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.stored_tensor import StoredTensor

VARIANTS = (
    "llama",
    "llama-tied",
    "llama-linear",
    "llama-llama3",
    "llama-bias",
    "mistral",
    "qwen2",
    "qwen3",
)

Files = Callable[..., Path]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_both_forms_give_the_weights_that_were_written(
    variant: str, kind: str, tiny: ModuleType, hf: Files, gguf: Files
) -> None:
    weights = tiny.build(variant).weights
    for path in (hf(variant, kind), gguf(variant, kind)):
        checkpoint = open_checkpoint(path)
        assert sorted(checkpoint.names()) == sorted(weights)
        for name, expected in weights.items():
            found = checkpoint.float32(name)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, expected, err_msg=f"{path.name}: {name}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_forms_describe_the_same_model(variant: str, hf: Files, gguf: Files) -> None:
    published, converted = open_checkpoint(hf(variant)), open_checkpoint(gguf(variant))
    first, second = published.config, converted.config
    # float32 in the GGUF file; GGUF has no "mistral" and keeps llama3 scaling as factors.
    for one, other in zip(first.rotations, second.rotations, strict=True):
        np.testing.assert_allclose(one.tables(4), other.tables(4), rtol=1e-5)
    assert second.norm_epsilon == pytest.approx(first.norm_epsilon, rel=1e-6)
    assert (
        replace(
            second,
            architecture=first.architecture,
            norm_epsilon=first.norm_epsilon,
            rope_scaling=first.rope_scaling,
        )
        == first
    )
    assert published.chat_template == converted.chat_template is not None
    assert published.eos_ids == converted.eos_ids == (264,)
    assert published.bos_id == converted.bos_id == 262
    assert not published.adds_bos
    assert not converted.adds_bos


def test_shards_are_one_model(tiny: ModuleType, hf: Files) -> None:
    directory = hf("llama", num_shards=3)
    assert len(list(directory.glob("*.safetensors"))) == 3
    checkpoint = open_checkpoint(directory)
    for name, expected in tiny.build().weights.items():
        np.testing.assert_array_equal(checkpoint.float32(name), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantized_rows_are_put_in_order_as_they_are(
    kind: str, tiny: ModuleType, gguf: Files
) -> None:
    """llama.cpp permutes q and k before it quantizes; blocks lie along rows, so both commute."""
    weights = tiny.build().weights
    checkpoint = open_checkpoint(gguf("llama", kind))
    for name, values in weights.items():
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        stored = Kind["F32" if values.ndim == 1 else "Q8_0" if is_table else kind]
        assert checkpoint.tensors[name].kind == stored
        expected = quants.dequantize(quants.quantize(values, stored), stored)
        np.testing.assert_array_equal(checkpoint.float32(name), expected, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_rows_of_k_quants_are_put_in_order(kind: Kind) -> None:
    """gguf cannot make K-quants, but any bytes with finite scales are some."""
    _, block_bytes = quants.GGML_QUANT_SIZES[kind]
    data = np.random.RandomState(0).randint(0, 60, (6, block_bytes)).astype(np.uint8)
    order = np.array([4, 0, 5, 2, 1, 3])
    values = StoredTensor((6, 256), kind, data).in_order(order).float32()
    assert np.isfinite(values).all()
    assert np.ptp(values) > 0
    np.testing.assert_array_equal(values, quants.dequantize(data, kind)[order])


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_opening_a_model_reads_no_weights(form: str, tiny: ModuleType, tmp_path: Path) -> None:
    """Nor does one weight read the others: they are 12 MB here."""
    model = tiny.build(intermediate_size=8192)
    path = getattr(tiny, f"write_{form}")(model, tmp_path / "model")
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        norm = checkpoint.float32("model.norm.weight")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(norm, model.weights["model.norm.weight"])
    assert peak < 2_000_000


def test_rows_that_are_made_and_those_of_vectors_are_the_ones_asked_for() -> None:
    values = np.arange(12, dtype=np.float32)
    vector, matrix = StoredTensor.of(values), values.reshape(4, 3)
    np.testing.assert_array_equal(vector.rows(slice(1, None, 2)).float32(), values[1::2])
    np.testing.assert_array_equal(vector.in_order(np.array([2, 0])).stored_rows()[0], [0, 0, 0, 64])
    made = replace(StoredTensor.of(matrix), read_rows=lambda rows: matrix[rows].view(np.uint8))
    np.testing.assert_array_equal(made.float32(), matrix)
    every_second = made.rows(slice(1, None, 2))
    assert every_second.shape == (2, 3)
    np.testing.assert_array_equal(every_second.float32(), matrix[1::2])
    np.testing.assert_array_equal(every_second.rows(np.array([1, 0])).float32(), matrix[[3, 1]])


@pytest.mark.parametrize("layer", ["mtp_layers.0", "layers.2"])
def test_layers_for_multi_token_prediction_are_left_out(
    layer: str, tiny: ModuleType, tmp_path: Path
) -> None:
    """MiMo is Qwen 2 beside them."""
    model = tiny.build("qwen2", num_hidden_layers=2)
    expected = set(model.weights)
    model.config.update({"model_type": "mimo", "num_nextn_predict_layers": 1})
    model.weights[f"model.{layer}.input_proj.weight"] = np.zeros((2, 2), np.float32)
    checkpoint = open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    assert set(checkpoint.tensors) == set(checkpoint.names()) == expected
