"""Layers for multi-token prediction in a model's own files: named as its draft, the model drafts
with them; otherwise they are left out. Their formulas are tested in test_eagle_heads.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.heads import EagleHead, EntryRows
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.heads import is_head, open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredTables
from fixtures import heads

LAYERS, VOCAB = 3, 265
PROMPT = [5, 6, 7, 8, 9, 10]
VARIANTS = {"deepseek": "llama", "mimo": "qwen2"}


def write(
    tiny: ModuleType, directory: Path, form: str, changed: Callable[[Any], object] = id
) -> Path:
    """A model with such a layer. changed: is given the head, to change it."""
    head = heads.draw(LAYERS, VOCAB, form)
    changed(head)
    model = tiny.build(VARIANTS[form], 2, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    if form == "mimo":
        model.config["model_type"] = "mimo"
    sizes = {"num_nextn_predict_layers": 1, "rope_theta": heads.THETA}
    model.config.update(sizes)
    model.weights.update(head.stored())
    return Path(tiny.write_hf(model, directory))


@pytest.mark.parametrize("form", VARIANTS)
@pytest.mark.parametrize("runtime", ["reference", "ort", "llamacpp"])
@pytest.mark.usefixtures("fixed_policy")
def test_a_model_drafts_with_its_own_layer(
    form: str, runtime: str, tiny: ModuleType, tmp_path: Path
) -> None:
    path = write(tiny, tmp_path / "model", form)
    assert is_head(path)
    with edge_spec.load(str(path), runtime=runtime, drafter="none", threads=1) as engine:
        plain = [token.id for token in engine.generate(PROMPT, max_tokens=30).tokens]
    with edge_spec.load(
        str(path), runtime=runtime, drafter="eagle", draft=str(path), threads=1
    ) as engine:
        result = engine.generate(PROMPT, max_tokens=30)
    assert [token.id for token in result.tokens] == plain
    assert result.stats.drafters["eagle"].draft_n > 0


@pytest.mark.parametrize("form", VARIANTS)
def test_the_layer_is_no_part_of_the_model(form: str, tiny: ModuleType, tmp_path: Path) -> None:
    source = open_checkpoint(write(tiny, tmp_path / "model", form))
    assert source.config.num_layers == LAYERS
    assert not [name for name in source.tensors if "mtp" in name or f"layers.{LAYERS}." in name]


def test_state_and_embedding_of_mimo_change_places(tiny: ModuleType, tmp_path: Path) -> None:
    path = write(tiny, tmp_path / "model", "mimo")
    read = open_head(path, open_checkpoint(path).config)
    assert isinstance(read, EagleHead)
    stored = heads.draw(LAYERS, VOCAB, "mimo").tensors["fc.weight"]
    np.testing.assert_array_equal(read.tensors["fc.weight"][:, :64], stored[:, 64:])
    assert str(read) == "MTP from features 3, scores 265 of 265 tokens"


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.usefixtures("fixed_policy")
def test_of_a_large_vocabulary_the_likely_tokens_are_scored(
    own_output: bool, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same, and so is what the layer says of each of them."""

    def change(head: heads.Head) -> None:
        if own_output:
            drawn = np.random.default_rng(3).standard_normal((VOCAB, heads.HIDDEN))
            head.tensors["shared_head.head.weight"] = drawn.astype(np.float32)

    path = write(tiny, tmp_path / "model", "deepseek", change)
    source = open_checkpoint(path)
    whole = open_head(path, source.config)
    assert isinstance(whole, EagleHead)
    ids = np.array([5, 90, 91, 264])
    tables = StoredTables(source)
    both = [EagleNetwork(each, tables) for each in (whole, whole.scoring(ids))]
    state = np.random.default_rng(0).standard_normal((1, heads.HIDDEN)).astype(np.float32)
    rows = EntryRows(
        both[0].embed(np.array([7])),
        state,
        np.empty((0, heads.HIDDEN), np.float32),
        *(np.array([0]) for _ in range(2)),
        0,
        None,
        np.array([0]),
    )
    cache = np.zeros((1, 2, heads.KV_HEADS, 1, heads.HEAD_DIM), np.float32)
    scores = [each.bound_to(cache)(rows)[1] for each in both]
    np.testing.assert_allclose(both[1].spread(scores[1])[0][ids], scores[0][0][ids], atol=1e-5)
    assert np.isneginf(np.delete(both[1].spread(scores[1])[0], ids)).all()

    with edge_spec.load(str(path), runtime="reference", drafter="none") as engine:
        plain = [token.id for token in engine.generate(PROMPT, max_tokens=30).tokens]
    seen: list[int] = []

    def likeliest(network: EagleNetwork, scores: np.ndarray) -> list[tuple[int, int]]:
        seen.append(len(scores))
        return asked(network, scores)

    asked = EagleNetwork.likeliest
    monkeypatch.setattr(EagleNetwork, "likeliest", likeliest)
    monkeypatch.setattr("edge_spec.text.frequent_tokens._FIRST", 128)
    monkeypatch.setattr("edge_spec.text.frequent_tokens._OF_SCRIPT", 4)
    with edge_spec.load(str(path), runtime="reference", drafter="eagle", draft=str(path)) as engine:
        result = engine.generate(PROMPT, max_tokens=30)
    assert [token.id for token in result.tokens] == plain
    assert result.stats.drafters["eagle"].draft_n > 0
    assert min(seen) >= 128 and max(seen) < 199


def _drop(name: str) -> Callable[[heads.Head], object]:
    return lambda head: head.tensors.pop(name)


def _set(name: str, *shape: int) -> Callable[[heads.Head], object]:
    return lambda head: head.tensors.update({name: np.zeros(shape, np.float32)})


REFUSED: dict[str, tuple[str, Callable[[heads.Head], object], str]] = {
    "no norm": ("deepseek", _drop("enorm.weight"), "model.layers.3.enorm.weight is missing"),
    "no state norm": ("mimo", _drop("hnorm.weight"), "mtp_layers.0.hidden_layernorm.weight is mi"),
    "no attention": ("mimo", _drop("self_attn.q_proj.weight"), "0.self_attn.q_proj.weight is miss"),
    "experts": ("deepseek", _set("mlp.experts.0.up_proj.weight", 2, 2), "mlp.experts.0.up_proj"),
    "latent": ("deepseek", _set("self_attn.q_a_proj.weight", 2, 2), "self_attn.q_a_proj.weight"),
    "shape": ("deepseek", _set("norm.weight", 3), "shared_head.norm.weight has the shape [3]"),
    "width": ("mimo", _set("fc.weight", 64, 96), "another target"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_that_is_not_computed_is_refused_by_its_name(
    case: str, tiny: ModuleType, tmp_path: Path
) -> None:
    form, breaks, told = REFUSED[case]
    path = write(tiny, tmp_path / "model", form, breaks)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(path), runtime="reference", draft=str(path))
    assert told in caught.value.message and "\n" not in str(caught.value)
    with edge_spec.load(str(path), runtime="reference") as engine:  # by itself, it runs
        assert engine.generate(PROMPT, max_tokens=2).stats.predicted_n == 2


def test_layers_that_are_stated_and_missing_are_no_head(tiny: ModuleType, tmp_path: Path) -> None:
    path = Path(tiny.write_hf(tiny.build(num_hidden_layers=LAYERS), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert not is_head(path)
    assert open_checkpoint(path).config.num_layers == LAYERS
    with pytest.raises(EdgeSpecError, match="and has none"):
        open_head(path, open_checkpoint(path).config)


def test_the_layer_of_another_model_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    """Its width and its vocabulary are the same."""
    path = write(tiny, tmp_path / "model", "deepseek")
    deeper = tiny.write_hf(tiny.build("llama", num_hidden_layers=LAYERS + 1), tmp_path / "deeper")
    with pytest.raises(EdgeSpecError, match="its model has 3 layers, this target 4"):
        open_head(path, open_checkpoint(Path(deeper)).config, has_weights=False)
