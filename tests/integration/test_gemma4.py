"""Gemma 4: what tests/integration/test_families.py does not ask of every family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edge_spec.core.config import ModelConfig
from edge_spec.core.config_problem import config_problem
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.model_parts import Experts, LayerEmbeddings, LayerKind
from edge_spec.core.rope import Rope, RopeScaling
from edge_spec.errors import UsageError
from edge_spec.exporters.block_quantize import quantize_stored
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.families import BY_MODEL_TYPE
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.gguf.trial import TEXTS
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.gguf_tokenizer import tokenizer_from_gguf
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.exporters.tensor_shapes import expected_shapes
from edge_spec.exporters.truncate import first_layers
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.testing import check_features
from fixtures import families, trained_tokenizers
from fixtures.family_gguf import write_gguf
from fixtures.side_by_side import scores_of

NAMES = ("gemma4", "gemma4-dense", "gemma4-experts")
TEXT = families.texts()[0].tolist()


def reference(stored: StoredCheckpoint) -> Model:
    return runtimes.load_runtime("reference").open(stored, RuntimeOptions())


def test_what_config_json_leaves_out_is_what_transformers_has() -> None:
    family = BY_MODEL_TYPE["gemma4"]
    stated = StatedConfig({**family.defaults, "model_type": "gemma4_text"}, Path("config.json"))
    fields = family.of_config(stated)
    sliding, full = fields["layer_kinds"]
    assert sliding == LayerKind(Rope(1e4), 512)
    divisors = (1.0,) * 64 + (1e30,) * 192
    assert full == LayerKind(Rope(1e6, RopeScaling("factors", factors=divisors)), head_dim=512)
    assert [layer for layer in range(30) if fields["kind_of_layer"][layer]] == [5, 11, 17, 23, 29]
    assert fields["layer_embeddings"] == LayerEmbeddings(256, 16.0, 2304**-0.5, 2**-0.5)
    assert fields["kv_sources"] == fields["intermediate_sizes"] == ()
    assert (stated.head_dim, stated.num_heads, stated.context_length) == (256, 8, 131072)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_full_layers_are_read_as_they_were_stated_before_transformers_5(
    name: str, family: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    (size,) = {each["head_dim"] for each in families.load(name).config["per_layer_config"].values()}
    directory = families.write_hf(
        name,
        tmp_path / "model",
        per_layer_config=None,
        global_head_dim=size,
        num_global_key_value_heads=1,
    )
    assert open_checkpoint(directory).config == family(name).config


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "value norm": ("gemma4", {"value_norm": False}),
    "attention scale": ("gemma4", {"attention_scale": None}),
    "sources": ("gemma4", {"kv_sources": (0, 1, 2, 3, 0, 1)}),
    "windows": ("gemma4", {}),
    "embeddings": (
        "gemma4",
        {"layer_embeddings": LayerEmbeddings(32, 1.0, 64**-0.5, 2**-0.5)},
    ),
    "score scale": ("gemma4-experts", {"score_scale": 1.0}),
    "scales of experts": ("gemma4-experts", {"expert_scales": False}),
}


def _tensors_of(stored: StoredCheckpoint, config: ModelConfig) -> StoredCheckpoint:
    """With those tensors alone that a description implies."""
    names = expected_shapes(config)
    tensors = {name: each for name, each in stored.tensors.items() if name in names}
    return replace(stored, config=config, tensors=tensors)


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_of_the_description_counts(
    change: str, family: Callable[[str], StoredCheckpoint]
) -> None:
    """So that the comparison with transformers would show a wrong one."""
    name, changes = CHANGES[change]
    stored = family(name)
    if change == "windows":
        wide = [replace(kind, window=None) for kind in stored.config.layer_kinds]
        changes = {"layer_kinds": tuple(wide)}
    if name == "gemma4-experts":
        assert stored.config.experts is not None
        changes = {"experts": replace(stored.config.experts, **changes)}
    expected = scores_of(reference(stored), TEXT)
    other = reference(_tensors_of(stored, replace(stored.config, **changes)))
    assert np.abs(scores_of(other, TEXT) - expected).max() > 0.05


@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_keys_and_values_that_no_layer_attends_to_are_not_read(
    source: str, family: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    weights = families.load("gemma4").weights
    unread = {f"self_attn.{part}.weight": None for part in ("k_proj", "v_proj", "k_norm")}
    if source == "hf":
        more = {f"model.layers.5.{name}": weights[f"model.layers.3.{name}"] for name in unread}
        path = families.write_hf("gemma4", tmp_path / "model", {**weights, **more})
    else:
        more = {
            f"blk.5.attn_{part}.weight": weights[f"model.layers.3.self_attn.{name}.weight"]
            for part, name in (("k", "k_proj"), ("v", "v_proj"), ("k_norm", "k_norm"))
        }
        path = write_gguf("gemma4", tmp_path / "model.gguf", more)
    found = open_checkpoint(path)
    expected = {*family("gemma4").tensors}
    assert {name for name in found.tensors if "rope_freqs" not in name} == expected


def test_of_experts_in_integers_only_blocks_are_rounded(
    family: Callable[[str], StoredCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the rounding of activations the graph computes what the blocks stand for."""
    monkeypatch.setattr("edge_spec.exporters.onnx.weights._ACCURACY_INT8", 0)
    stored, out = family("gemma4-experts"), tmp_path / "out"
    options = ExportOptions("int8", check=False)
    OnnxExporter().export(stored, out, options, lambda *_: None)
    in_blocks = {name: _in_blocks(name, tensor) for name, tensor in stored.tensors.items()}
    expected = scores_of(reference(replace(stored, tensors=in_blocks)), TEXT)
    model = OrtRuntime().open(open_bundle(out), RuntimeOptions())
    np.testing.assert_allclose(scores_of(model, TEXT), expected, atol=1e-4, rtol=0)
    assert np.abs(scores_of(reference(stored), TEXT) - expected).max() > 0.01
    model.close()


def _in_blocks(name: str, tensor: StoredTensor) -> StoredTensor:
    """All matrices but the router, which stays in float32."""
    if len(tensor.shape) != 2 or ".router." in name:
        return tensor
    values = quantize_stored([tensor], 8, 32).dequantize()
    return replace(tensor, data=np.ascontiguousarray(values).view(np.uint8))


def test_the_first_layers_are_a_draft_unless_layers_have_embeddings(
    family: Callable[[str], StoredCheckpoint],
) -> None:
    first = first_layers(family("gemma4-dense"), 3)
    assert first.config.cache_blocks == {"kv": (0, 1), "kv.1": (2,)}
    assert scores_of(reference(first), TEXT).shape[1] == families.VOCABULARY
    with pytest.raises(UsageError, match="embeddings of its layers"):
        first_layers(family("gemma4"), 3)


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_streams_that_the_reference_computes(
    name: str,
    family: Callable[[str], StoredCheckpoint],
    family_bundle: Callable[[str], Bundle],
) -> None:
    """With what a layer adds of its own embedding, and its scale."""
    exact = reference(family(name))
    model = OrtRuntime().open(family_bundle(name), RuntimeOptions(threads=1))
    found, expected = (check_features(each, (1, 3, 6), 1e-4) for each in (model, exact))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    model.close()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-experts"])
def test_a_conversion_that_was_interrupted_goes_on_to_the_same_files(
    name: str,
    family: Callable[[str], StoredCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its table of embeddings and the matrix beside it are made before the first layer."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    options = ExportOptions("int8", check=False)
    told: list[str] = []

    def interrupt(what: str, done: float) -> None:
        told.append(what)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OnnxExporter().export(family(name), tmp_path / "first", options, interrupt)
    assert not (tmp_path / "first").exists()
    again: list[str] = []
    for out in ("first", "second"):
        OnnxExporter().export(
            family(name), tmp_path / out, options, lambda what, done: again.append(what)
        )
    assert any("were kept" in what for what in again)
    for path in (tmp_path / "second").glob("*.onnx*"):
        assert (tmp_path / "first" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("seed", [None, 1])
def test_a_vocabulary_is_read_as_llama_cpp_reads_it(
    seed: int | None, llama_ids: Callable[[Path, str], list[int]], tmp_path: Path
) -> None:
    expected = trained_tokenizers.characters()
    if seed is not None:
        expected = trained_tokenizers.permuted(expected, seed)
    described = json.loads(expected.to_str())
    vocabulary = expected.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    kinds = {token: 3 for token in trained_tokenizers.SPECIAL}
    kinds |= {token: 6 for token in tokens if re.fullmatch("<0x[0-9A-F]{2}>", token)}
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    own = tokenizer_from_gguf(GgufFile(path).metadata, path)
    texts = [
        *TEXTS,
        "\n\n\n a  b\n",
        "<|end|> x\n\n<|user|>",
        "",
        " ",
        "\ufffd\x00 \U0001f9ff",
        "\n" * 9,
    ]
    for text in texts:
        ids = own.encode(text).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids == llama_ids(path, text)
        assert own.decode(ids, skip_special_tokens=False) == text


_FIVE: dict[str, Any] = {
    "num_experts": 5,
    "experts_used": 2,
    "intermediate_sizes": (),
    "experts": Experts(dense_size=48, beside_mlp=True),
}
PROBLEMS: dict[str, dict[str, Any]] = {
    "keys and values that other layers do not have": {"kv_sources": (0, 1, 2, 3, 5, 5)},
    "heads of 0": {"layer_kinds": (LayerKind(Rope(1e4), head_dim=0), LayerKind(Rope(1e4)))},
    "do not share 3": {"layer_kinds": (LayerKind(Rope(1e4)), LayerKind(None, num_kv_heads=3))},
    "MLPs of its layers": {"intermediate_sizes": (48, 0, 48, 48, 48, 48)},
    "embeddings of 0 elements": {"layer_embeddings": LayerEmbeddings(0, 1.0, 1.0, 1.0)},
    "no positive number": {"layer_embeddings": LayerEmbeddings(32, 1.0, -1.0, 1.0)},
    "norms 'after'": {**_FIVE, "norm_places": "after"},
    "beside experts have a width of 0": {**_FIVE, "experts": Experts(beside_mlp=True)},
    "scales or caps": {**_FIVE, "experts": replace(_FIVE["experts"], score_scale=0.0)},
}


@pytest.mark.parametrize(
    "sources",
    [
        (0, 1, 2, 3, 5, 4),
        (0, 1, 2, 3, 2),
        (0, 1, 2, 3, 9, 3),
        (0, 1, 2, 3, 3, 2),
        (0, 1, 2, 3, -1, 3),
    ],
)
def test_sources_that_no_model_has_are_refused(
    sources: tuple[int, ...], family: Callable[[str], StoredCheckpoint]
) -> None:
    config = replace(family("gemma4").config, kv_sources=sources)
    assert "that other layers do not have" in str(config_problem(config))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_layers_that_no_model_has_are_refused(
    problem: str, family: Callable[[str], StoredCheckpoint]
) -> None:
    config = replace(family("gemma4").config, **PROBLEMS[problem])
    assert problem in str(config_problem(config))


@pytest.mark.parametrize("name", NAMES)
def test_the_description_comes_back_from_a_manifest(
    name: str, family: Callable[[str], StoredCheckpoint], family_bundle: Callable[[str], Bundle]
) -> None:
    config = family(name).config
    assert config_problem(config) is None
    assert family_bundle(name).config == config == ModelConfig.from_dict(config.to_dict())
