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

from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf.vocabulary import TEXTS
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from edge_spec.exporters.reader import open_checkpoint

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


IDS = "no tokenizer that gives the ids.*--runtime ort"
SPLITS = (
    "marks belong to words",
    "nothing is split",
    "a space comes first",
    "words and nothing else",
    "digits in threes from the right",
)
FLAGS = ("lstrip", "rstrip", "single_word")  # of a token that takes its surroundings along
# A tokenizer, what else `tokenized` makes of it, and why it is refused.
REFUSED: dict[str, tuple[Callable[[ModuleType], Any], dict[str, Any], str]] = {
    **{
        each: (lambda made, each=each: made.byte_level(made.OTHER[each]), {}, IDS)
        for each in SPLITS
    },
    **{each: (lambda made, each=each: with_flag(made, each), {}, IDS) for each in FLAGS},
    # llama.cpp adds one after each special token too, where it adds any.
    "a space before the first word alone": (lambda made: made.sentencepiece("first"), {}, IDS),
    "no BPE": (lambda made: unigram(), {}, "is Unigram, only BPE"),
    "larger than the model": (
        lambda made: made.byte_level([]),
        {"spare": -1},
        r"has \d+ tokens.*the model scores",
    ),
    "more ends than GGUF has names for": (
        lambda made: made.byte_level(made.PUBLISHED["gpt-2"]),
        {"files": {"generation_config.json": {"eos_token_id": [1, 2, 3, 4]}}},
        "any of 4 tokens, a GGUF file names at most 3",
    ),
}


def with_flag(trained: ModuleType, flag: str) -> Any:
    tokenizer = json.loads(trained.byte_level(trained.PUBLISHED["gpt-2"]).to_str())
    tokenizer["added_tokens"][0][flag] = True
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], 0, False))
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(
    case: str, trained: ModuleType, tokenized: Tokenized, tmp_path: Path
) -> None:
    make, more, why = REFUSED[case]
    source = tokenized(make(trained), **more)
    error = ModelFileError if case == "larger than the model" else UnsupportedModelError
    with pytest.raises(error, match=why) as caught:
        trained.export(source, tmp_path / "out.gguf")
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "out.gguf").exists()


# Tokens that are no words: paddings, ends, beginnings, and those found before text is split.


def test_a_gap_between_the_ids_is_filled(
    trained: ModuleType, tokenized: Tokenized, tmp_path: Path, llama_ids: LlamaIds
) -> None:
    tokenizer = json.loads(trained.byte_level(trained.PUBLISHED["gpt-2"]).to_str())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"]["<far>"] = size + 5
    added = dict(tokenizer["added_tokens"][0], id=size + 5, content="<far>", special=False)
    tokenizer["added_tokens"].append(added)
    source = tokenized(tokenizer)
    path = trained.export(source, tmp_path / "out.gguf")
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.tokens"][size:] == [
        *(f"[PAD{token}]" for token in range(size, size + 5)),
        "<far>",
    ]
    assert metadata["tokenizer.ggml.token_type"][size:].tolist() == [5, 5, 5, 5, 5, 4]
    trained.same_ids(source, path, llama_ids, ["so <far>away", "<far><far>"])


@pytest.mark.parametrize(
    ("eos", "stated", "expected"),
    [
        (5, None, [5]),
        ([5, 9], None, [5, 9]),
        ([5, 9], "<|user|>", [1, 5, 9]),
        ([0, 1], "<|user|>", [1, 0]),
        ([1, 7, 0], {"content": "<|user|>"}, [1, 0, 7]),
    ],
)
def test_every_end_of_a_text_is_named(
    trained: ModuleType,
    eos: Any,
    stated: Any,
    expected: list[int],
    tokenized: Tokenized,
    tmp_path: Path,
) -> None:
    """The first is the tokenizer's own EOS, which chat templates and other programs use."""
    files = {
        "generation_config.json": {"eos_token_id": eos},
        "tokenizer_config.json": {"eos_token": stated},
    }
    source = tokenized(trained.byte_level(trained.PUBLISHED["gpt-2"]), files=files)
    path = trained.export(source, tmp_path / "out.gguf")
    metadata = GgufFile(path).metadata
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    assert [metadata[key] for key in keys if key in metadata] == expected
    assert set(open_checkpoint(path).eos_ids) == set(source.eos_ids) == set(expected)


@pytest.mark.parametrize(
    ("stated", "processor", "expected"),
    [
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_a_bos_is_added_where_the_directory_adds_one(
    trained: ModuleType,
    stated: bool | None,
    processor: bool,
    expected: bool,
    tokenized: Tokenized,
    tmp_path: Path,
) -> None:
    """Llama 3's tokenizer_config.json does not say so; the template in tokenizer.json does."""
    tokenizer = trained.byte_level(trained.PUBLISHED["llama3"])
    if processor:
        template = tokenizers.processors.TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", 1)]
        )
        tokenizer.post_processor = tokenizers.processors.Sequence(
            [tokenizers.processors.ByteLevel(), template]
        )
    files = {"tokenizer_config.json": {} if stated is None else {"add_bos_token": stated}}
    source = tokenized(tokenizer, files=files, bos_token_id=1)
    assert source.adds_bos == expected
    path = trained.export(source, tmp_path / "out.gguf")
    assert GgufFile(path).metadata["tokenizer.ggml.add_bos_token"] == expected
    assert open_checkpoint(path).adds_bos == expected


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
