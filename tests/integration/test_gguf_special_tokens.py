"""Tokens that are no words: paddings, ends, beginnings, and those found before text is split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers

from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint

Tokenized = Callable[..., StoredCheckpoint]
LlamaIds = Callable[[Path, str], list[int]]


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(
    trained: ModuleType, tokenized: Tokenized, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=r"has \d+ tokens.*the model scores"):
        trained.export(tokenized(trained.byte_level([]), spare=-1), tmp_path / "out.gguf")


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


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_token_that_takes_its_surroundings_along_is_refused(
    trained: ModuleType, flag: str, tokenized: Tokenized, tmp_path: Path
) -> None:
    tokenizer = json.loads(trained.byte_level(trained.PUBLISHED["gpt-2"]).to_str())
    tokenizer["added_tokens"][0][flag] = True
    with pytest.raises(UnsupportedModelError, match="no tokenizer that gives the ids"):
        trained.export(tokenized(tokenizer), tmp_path / "out.gguf")


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


def test_more_ends_of_a_text_than_gguf_has_names_for_are_refused(
    trained: ModuleType, tokenized: Tokenized, tmp_path: Path
) -> None:
    files = {"generation_config.json": {"eos_token_id": [1, 2, 3, 4]}}
    with pytest.raises(UnsupportedModelError, match="any of 4 tokens, a GGUF file names at most 3"):
        trained.export(
            tokenized(trained.byte_level(trained.PUBLISHED["gpt-2"]), files=files),
            tmp_path / "out.gguf",
        )


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
