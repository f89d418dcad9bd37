"""Gemma 4: what tests/integration/test_families.py does not ask of every family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from edge_spec.core.config import ModelConfig
from edge_spec.core.config_problem import config_problem
from edge_spec.core.experts import Experts
from edge_spec.core.export import ExportOptions
from edge_spec.core.layer_kind import LayerEmbeddings, LayerKind
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.rope import Rope, RopeScaling
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
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
from fixtures import tiny_models as tiny
from fixtures.family_gguf import write_gguf
from fixtures.side_by_side import scores_of

NAMES = ("gemma4", "gemma4-dense", "gemma4-experts")
TEXT = families.texts()[0].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StoredCheckpoint]:
    @cache
    def opened(name: str) -> StoredCheckpoint:
        directory = tmp_path_factory.mktemp("hf") / name
        return open_checkpoint(families.write_hf(name, directory))

    return opened


@pytest.fixture(scope="module")
def bundle(
    checkpoint: Callable[[str], StoredCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Bundle]:
    @cache
    def exported(name: str) -> Bundle:
        out = tmp_path_factory.mktemp("bundle") / name
        options = ExportOptions(quantization="fp32", check=False)
        OnnxExporter().export(checkpoint(name), out, options, lambda *_: None)
        return open_bundle(out)

    return exported


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
    name: str, checkpoint: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    stated = {key: families.CONFIGS[name].get(key) for key in ("global_head_dim",)}
    stated["num_global_key_value_heads"] = 1
    directory = families.write_hf(name, tmp_path / "model", per_layer_config=None, **stated)
    assert open_checkpoint(directory).config == checkpoint(name).config


CHANGES: dict[str, dict[str, Any]] = {
    "value norm": {"value_norm": False},
    "attention scale": {"attention_scale": None},
    "sources": {"kv_sources": (0, 1, 2, 3, 0, 1)},
    "windows": {"kind_of_layer": (0, 1, 0, 1, 0, 1)},
    "embeddings": {"layer_embeddings": LayerEmbeddings(32, 1.0, 64**-0.5, 2**-0.5)},
}


OF_EXPERTS: dict[str, dict[str, Any]] = {
    "score scale": {"score_scale": 1.0},
    "scales of experts": {"expert_scales": False},
}


@pytest.mark.parametrize("change", OF_EXPERTS)
def test_each_part_of_the_description_of_experts_counts(
    change: str, checkpoint: Callable[[str], StoredCheckpoint]
) -> None:
    stored = checkpoint("gemma4-experts")
    assert stored.config.experts is not None
    expected = scores_of(reference(stored), TEXT)
    experts = replace(stored.config.experts, **OF_EXPERTS[change])
    other = reference(_tensors_of(stored, replace(stored.config, experts=experts)))
    assert np.abs(scores_of(other, TEXT) - expected).max() > 0.05


def _tensors_of(stored: StoredCheckpoint, config: ModelConfig) -> StoredCheckpoint:
    """With those tensors alone that a description implies."""
    names = expected_shapes(config)
    tensors = {name: each for name, each in stored.tensors.items() if name in names}
    return replace(stored, config=config, tensors=tensors)


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_of_the_description_counts(
    change: str, checkpoint: Callable[[str], StoredCheckpoint]
) -> None:
    """So that the comparison with transformers would show a wrong one."""
    stored = checkpoint("gemma4")
    expected = scores_of(reference(stored), TEXT)
    changes = dict(CHANGES[change])
    if change == "windows":
        wide = [replace(kind, window=None) for kind in stored.config.layer_kinds]
        changes = {"layer_kinds": tuple(wide)}
    other = replace(stored, config=replace(stored.config, **changes))
    assert np.abs(scores_of(reference(other), TEXT) - expected).max() > 0.05


def test_the_text_model_of_one_that_sees_and_hears_is_taken(
    checkpoint: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    alone, directory = families.load("gemma4"), tmp_path / "model"
    families.write_hf("gemma4", directory)
    text = {**alone.config, "use_bidirectional_attention": "vision"}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": {}}
    tiny.write_json(directory / "config.json", config)
    stored = {
        name.replace("model.", "model.language_model.", 1): ("F32", values)
        for name, values in alone.weights.items()
    }
    other = ("F32", np.ones((2, 2), np.float32))
    for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"):
        stored[f"model.{part}.weight"] = other
    (directory / "model.safetensors").write_bytes(tiny.safetensors(stored))
    found, expected = open_checkpoint(directory), checkpoint("gemma4")
    assert found.config == expected.config
    for name in expected.names():
        np.testing.assert_array_equal(found.float32(name), expected.float32(name))


@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_keys_and_values_that_no_layer_attends_to_are_not_read(
    source: str, checkpoint: Callable[[str], StoredCheckpoint], tmp_path: Path
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
    expected = {*checkpoint("gemma4").tensors}
    assert {name for name in found.tensors if "rope_freqs" not in name} == expected


def test_attention_to_later_tokens_is_named_before_weights_are_read(tmp_path: Path) -> None:
    changes = {"use_bidirectional_attention": "all"}
    directory = families.write_hf("gemma4", tmp_path / "model", **changes)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="later tokens"):
        open_checkpoint(directory)


STATED = {
    "lacks a valid value: 'num_experts'": {"num_experts": None},
    "its tokens take 6 of 5 experts": {"top_k_experts": 6},
    "expected 4 experts": {"num_experts": 4},
    "gate_up_proj.weight has 80 rows, expected 96": {"moe_intermediate_size": 48},
}


@pytest.mark.parametrize("problem", STATED)
def test_experts_that_weights_do_not_have_are_named(problem: str, tmp_path: Path) -> None:
    directory = families.write_hf("gemma4-experts", tmp_path / "model", **STATED[problem])
    with pytest.raises(ModelFileError, match=problem) as told:
        open_checkpoint(directory)
    assert "\n" not in str(told.value)


def test_a_gguf_file_that_states_experts_and_has_none_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        "gemma4-dense",
        tmp_path / "model.gguf",
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    )
    with pytest.raises(ModelFileError, match=r"tensor model.layers.0.mlp.expert\S+ is missing"):
        open_checkpoint(path)


def test_of_experts_in_integers_only_blocks_are_rounded(
    checkpoint: Callable[[str], StoredCheckpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the rounding of activations the graph computes what the blocks stand for."""
    monkeypatch.setattr("edge_spec.exporters.onnx.weights._ACCURACY_INT8", 0)
    stored, out = checkpoint("gemma4-experts"), tmp_path / "out"
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
    checkpoint: Callable[[str], StoredCheckpoint],
) -> None:
    first = first_layers(checkpoint("gemma4-dense"), 3)
    assert first.config.cache_blocks == {"kv": (0, 1), "kv.1": (2,)}
    assert scores_of(reference(first), TEXT).shape[1] == families.VOCABULARY
    with pytest.raises(UsageError, match="embeddings of its layers"):
        first_layers(checkpoint("gemma4"), 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("runtime", ["reference", "ort"])
def test_a_cache_with_blocks_of_two_shapes_goes_on_elsewhere(
    runtime: str,
    name: str,
    checkpoint: Callable[[str], StoredCheckpoint],
    bundle: Callable[[str], Bundle],
) -> None:
    opened = runtimes.load_runtime(runtime)
    source = bundle(name) if runtime == "ort" else checkpoint(name)
    model = opened.open(source, RuntimeOptions())
    first, second = model.open_session(), model.open_session()
    first.prefill(TEXT[:12])
    state = first.state()
    assert list(state) == ["kv", "kv.1"] and state["kv"].shape != state["kv.1"].shape
    wrong = {"kv": state["kv.1"], "kv.1": state["kv"]}
    with pytest.raises(ValueError, match="kv"):
        second.restore(wrong, 12)
    second.restore(state, 12)
    tree = TokenTree.chain(TEXT[12], TEXT[13:16])
    np.testing.assert_array_equal(second.forward(tree).logits, first.forward(tree).logits)
    model.close()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_two_shapes_grow_with_their_text(
    name: str, bundle: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with the keys and values of others find these where they have moved."""
    model = OrtRuntime().open(bundle(name), RuntimeOptions())
    whole = model.open_session()
    whole.prefill(TEXT[:20])
    monkeypatch.setattr("edge_spec.runtimes.ort.cache.GROWTH_TOKENS", 4)
    session = model.open_session()
    for token in TEXT[:20]:
        session.forward(TokenTree.chain(token))
        session.commit([0])
    tree = TokenTree(np.array(TEXT[20:24]), np.array([-1, 0, 0, 1]), np.ones(4))
    found, expected = session.forward(tree).logits, whole.forward(tree).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_streams_that_the_reference_computes(
    name: str,
    checkpoint: Callable[[str], StoredCheckpoint],
    bundle: Callable[[str], Bundle],
) -> None:
    """With what a layer adds of its own embedding, and its scale."""
    exact = reference(checkpoint(name))
    model = OrtRuntime().open(bundle(name), RuntimeOptions(threads=1))
    found, expected = (check_features(each, (1, 3, 6), 1e-4) for each in (model, exact))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    model.close()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-experts"])
def test_a_conversion_that_was_interrupted_goes_on_to_the_same_files(
    name: str,
    checkpoint: Callable[[str], StoredCheckpoint],
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
        OnnxExporter().export(checkpoint(name), tmp_path / "first", options, interrupt)
    assert not (tmp_path / "first").exists()
    again: list[str] = []
    for out in ("first", "second"):
        OnnxExporter().export(
            checkpoint(name), tmp_path / out, options, lambda what, done: again.append(what)
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


_SHARED = "layers with the keys and values of others"
FEATURES = {"gemma4": _SHARED, "gemma4-dense": "several sizes", "gemma4-experts": _SHARED}


@pytest.mark.parametrize("name", NAMES)
def test_other_devices_than_the_cpu_and_openvino_are_refused(
    name: str, bundle: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="cuda0", provider="CUDAExecutionProvider")
    monkeypatch.setattr(OrtRuntime, "_devices", lambda self, providers: [device])
    with pytest.raises(UsageError, match=f"{FEATURES[name]}, which ort computes on the CPU"):
        OrtRuntime().open(bundle(name), RuntimeOptions(providers=("cuda0",)))
    pytest.importorskip("openvino")
    with pytest.raises(UnsupportedModelError, match=FEATURES[name]):
        runtimes.load_runtime("openvino").open(bundle(name), RuntimeOptions())


@pytest.mark.parametrize("format", ["gguf", "coreml", "onnx-static"])
def test_other_writers_name_what_they_do_not_write(
    format: str, checkpoint: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    exporter = runtimes.load_exporter(format)
    with pytest.raises(UnsupportedModelError, match="value norm, layer scale, kv sources") as told:
        exporter.export(checkpoint("gemma4"), tmp_path / "out", ExportOptions(), lambda *_: None)
    assert "layer embeddings" in str(told.value) and "\n" not in str(told.value)


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
    sources: tuple[int, ...], checkpoint: Callable[[str], StoredCheckpoint]
) -> None:
    config = replace(checkpoint("gemma4").config, kv_sources=sources)
    assert "that other layers do not have" in str(config_problem(config))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_layers_that_no_model_has_are_refused(
    problem: str, checkpoint: Callable[[str], StoredCheckpoint]
) -> None:
    config = replace(checkpoint("gemma4").config, **PROBLEMS[problem])
    assert problem in str(config_problem(config))


@pytest.mark.parametrize("name", NAMES)
def test_the_description_comes_back_from_a_manifest(
    name: str, checkpoint: Callable[[str], StoredCheckpoint], bundle: Callable[[str], Bundle]
) -> None:
    config = checkpoint(name).config
    assert config_problem(config) is None
    assert bundle(name).config == config == ModelConfig.from_dict(config.to_dict())
