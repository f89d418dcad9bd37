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

from edge_spec.core.config import config_problem
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.model_parts import Experts, LayerEmbeddings, LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf.vocabulary import TEXTS
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.gguf_tokenizer import tokenizer_from_gguf
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort import OrtRuntime
from fixtures import trained_tokenizers
from fixtures.feature_checks import check_features

NAMES = ("gemma4", "gemma4-dense", "gemma4-experts")


def reference(stored: StoredCheckpoint) -> Model:
    return runtimes.load_runtime("reference").open(stored, RuntimeOptions())


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
