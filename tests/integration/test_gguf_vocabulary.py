"""A tokenizer.json becomes a vocabulary with which llama.cpp gives the same ids, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf.vocabulary import TEXTS, vocabulary_of
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from edge_spec.exporters.reader import open_checkpoint

REASONS = (
    "marks belong to words",
    "nothing is split",
    "a space comes first",
    "words and nothing else",
    "digits in threes from the right",
)

Tokenized = Callable[..., StoredCheckpoint]
LlamaIds = Callable[[Path, str], list[int]]


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama3", "qwen2", "tekken"])
def test_llama_cpp_gives_the_ids_of_a_byte_level_tokenizer(
    trained: ModuleType, name: str, tokenized: Tokenized, tmp_path: Path, llama_ids: LlamaIds
) -> None:
    source = tokenized(trained.byte_level(trained.PUBLISHED[name]))
    path = trained.export(source, tmp_path / "out.gguf")
    assert GgufFile(path).metadata["tokenizer.ggml.pre"] == name
    others = ["<|user|>Hi, it's 12345!<|end|>\n", "  <|end|>x", "x = [1, 22, 333]\r\n\r\n"]
    trained.same_ids(source, path, llama_ids, [*TEXTS, *others])


def test_the_texts_tell_all_pre_tokenizers_apart(trained: ModuleType) -> None:
    described = json.loads(trained.byte_level([]).to_str())
    vocabulary = described["model"]["vocab"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.get),
        "tokenizer.ggml.token_type": np.ones(len(vocabulary), np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
    }
    # Some split alike and differ in whole words alone: tests/unit/exporters/test_gguf_tokenizer.py.
    names = {splits: name for name, (splits, _) in PRE_TOKENIZERS.items()}.values()
    built = {
        name: tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": name}, Path("x"))
        for name in names
    }
    for first, second in combinations(built, 2):
        ids = ([built[name].encode(text).ids for text in TEXTS] for name in (first, second))
        assert any(a != b for a, b in zip(*ids, strict=True)), (first, second)


@pytest.mark.parametrize("reason", REASONS)
def test_a_way_to_split_that_llama_cpp_does_not_have_is_refused(
    trained: ModuleType, reason: str, tokenized: Tokenized, tmp_path: Path
) -> None:
    source = tokenized(trained.byte_level(trained.OTHER[reason]))
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer that gives the ids"):
        trained.export(source, tmp_path / "out.gguf")
    with pytest.raises(UnsupportedModelError, match="--runtime ort") as caught:
        vocabulary_of(source)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("prefix", ["every", "none"])
def test_llama_cpp_gives_the_ids_of_a_sentencepiece_tokenizer(
    trained: ModuleType, prefix: str, tokenized: Tokenized, tmp_path: Path, llama_ids: LlamaIds
) -> None:
    source = tokenized(trained.sentencepiece(prefix))
    path = trained.export(source, tmp_path / "out.gguf")
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] == (prefix == "every")
    assert metadata["tokenizer.ggml.unknown_token_id"] == 0
    assert metadata["tokenizer.ggml.token_type"][:4].tolist() == [2, 3, 3, 6]
    others = ["<s>Hi, it's 12345!</s>", "\u0416\u4e2d\U0001f9ff unseen", "x = [1, 22]\r\n\r\n"]
    trained.same_ids(source, path, llama_ids, [*TEXTS, *others])


def test_a_space_before_the_first_word_alone_is_refused(
    trained: ModuleType, tokenized: Tokenized, tmp_path: Path
) -> None:
    """llama.cpp adds one after each special token too, where it adds any."""
    with pytest.raises(UnsupportedModelError, match="no tokenizer that gives the ids"):
        trained.export(tokenized(trained.sentencepiece("first")), tmp_path / "out.gguf")


def test_other_models_than_bpe_are_refused(
    trained: ModuleType, tokenized: Tokenized, tmp_path: Path
) -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], 0, False))
    unigram.add_special_tokens(["<s>"])
    with pytest.raises(UnsupportedModelError, match="is Unigram, only BPE"):
        trained.export(tokenized(unigram), tmp_path / "out.gguf")


@pytest.mark.model
def test_the_demo_vocabulary_is_recognised_as_published(
    trained: ModuleType, demo_gguf: Path, tiny: ModuleType, tmp_path: Path, llama_ids: LlamaIds
) -> None:
    """SmolLM2's tokenizer.json has these steps; tests/fixtures has llama.cpp's ids."""
    metadata = GgufFile(demo_gguf).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(trained.PUBLISHED["smollm"])
    tokenizer.decoder = decoders.ByteLevel()
    control = np.nonzero(metadata["tokenizer.ggml.token_type"] == 3)[0]
    tokenizer.add_special_tokens([tokens[token] for token in control])
    directory = tmp_path / "model"
    tiny.write_hf(tiny.build(vocab_size=len(tokens), hidden_size=32), directory)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    path = trained.export(open_checkpoint(directory), tmp_path / "out.gguf")
    written = GgufFile(path).metadata
    assert written["tokenizer.ggml.pre"] == "smollm"
    for key in ("tokens", "merges", "token_type"):
        np.testing.assert_array_equal(
            written[f"tokenizer.ggml.{key}"], metadata[f"tokenizer.ggml.{key}"]
        )
    fixture = Path(__file__).parents[1] / "fixtures" / "tokenizer_smollm2.json"
    for case in json.loads(fixture.read_text(encoding="utf-8"))["texts"]:
        assert llama_ids(path, case["text"]) == case["ids"]
