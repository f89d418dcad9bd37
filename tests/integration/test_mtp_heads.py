"""Layers for multi-token prediction in a model's own files: named as its draft, the model drafts
with them; otherwise they are left out. Their formulas are tested in test_eagle_heads.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.heads import is_head
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


def _drop(name: str) -> Callable[[heads.Head], object]:
    return lambda head: head.tensors.pop(name)


def _set(name: str, *shape: int) -> Callable[[heads.Head], object]:
    return lambda head: head.tensors.update({name: np.zeros(shape, np.float32)})


REFUSED: dict[str, tuple[str, Callable[[heads.Head], object], str]] = {
    "no norm": ("deepseek", _drop("enorm.weight"), "model.layers.3.enorm.weight is missing"),
    "experts": ("deepseek", _set("mlp.experts.0.up_proj.weight", 2, 2), "mlp.experts.0.up_proj"),
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
