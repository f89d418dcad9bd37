"""What `hf:` names mean, which files of a repository are taken, who drafts for whom, and what a
server may send in the place of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from edge_spec.errors import DownloadError, UnsupportedModelError, UsageError
from edge_spec.models.hub import HubReference, choose, has_to_be_head, known_draft
from edge_spec.models.hub_download import (
    MAX_FILE_BYTES,
    MAX_SMALL_BYTES,
    RemoteFile,
    check_sizes,
    fetch_blobs,
)

CHUNK = b"x" * 40
STATED_BYTES = 100
DIRECTORY = ["config.json", "tokenizer.json"]
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def chosen(names: list[str], model: str = "hf:org/name") -> tuple[str, ...]:
    return choose(HubReference.parse(model), names)


@pytest.mark.parametrize(
    "model",
    [
        *(
            "hf:",
            "hf:name",
            "hf:org/",
            "hf:/name",
            "hf:a/b/c",
            "hf:../name",
            "hf:org/..",
            "org/name",
        ),
        *(
            "org/name",
            "hf:org/a--b",
            "hf:org/a..b",
            "hf:org/name@",
            "hf:org/name:",
            "hf:org\\x/name",
        ),
        *("hf:org/name@../../x", "hf:org/name@/x", "hf:org/name@a/../b", "hf:org/name@a b"),
        *("hf:org/name:../x.gguf", "hf:org/name:/x.gguf", "hf:org/name:a\\x.gguf"),
        *("hf:org/name:C:x.gguf", "hf:org/name:model.bin", "hf:org/name:model.safetensors"),
    ],
)
def test_a_malformed_reference_is_bad_usage(model: str) -> None:
    with pytest.raises(UsageError):
        HubReference.parse(model)


def test_shards_are_taken_with_their_index_or_not_at_all() -> None:
    assert chosen([*SHARDS, INDEX, *DIRECTORY]) == (*DIRECTORY, INDEX, *SHARDS)
    with pytest.raises(UnsupportedModelError, match="neither GGUF files nor"):
        chosen([*SHARDS[:2], INDEX, *DIRECTORY])


@pytest.mark.parametrize("weights", ["model.safetensors", "medusa_lm_head.safetensors"])
def test_a_directory_without_a_tokenizer_has_to_be_a_head(weights: str) -> None:
    reference = HubReference.parse("hf:org/name")
    found = choose(reference, ["config.json", weights, "tokenizer.model"])
    assert found == ("config.json", weights) and has_to_be_head(found)
    assert not has_to_be_head(choose(reference, [*DIRECTORY, "model.safetensors"]))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_0.gguf"], "m-Q4_0.gguf"),
        (["m.q8_0.gguf", "m.q4_k_m.gguf", "m.f16.gguf"], "m.q8_0.gguf"),
        (["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-IQ4_XS.gguf"], "m-Q4_K_M.gguf"),
        (["m-bf16.gguf", "m-Q2_K.gguf"], "m-bf16.gguf"),
        (["whatever.gguf", "mmproj-model-f16.gguf"], "whatever.gguf"),
        (["Q4_0/m-00001-of-00002.gguf", "Q8_0/m-Q8_0.gguf", "m-Q6_K.gguf"], "Q8_0/m-Q8_0.gguf"),
        (["my_model_Q4_0.gguf", "my_model_Q4_0_4_4.gguf"], "my_model_Q4_0.gguf"),
    ],
)
def test_of_several_gguf_files_the_preferred_one_is_taken(names: list[str], expected: str) -> None:
    assert chosen(names) == (expected,)


def test_a_model_in_parts_is_refused_with_what_joins_them() -> None:
    parts = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"]
    with pytest.raises(UnsupportedModelError, match="llama-gguf-split --merge"):
        chosen(parts)
    with pytest.raises(UnsupportedModelError, match="llama-gguf-split --merge"):
        chosen(parts, f"hf:org/name:{parts[0]}")


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-GGUF", "Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "bartowski/Llama-3.2-1B-Instruct-GGUF"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google/gemma-3-27b-it", "google/gemma-3-270m-it"),
        ("Qwen/Qwen2.5-0.5B-Instruct", None),
        ("someone/Qwen2.5-7B-Instruct", None),
        ("Qwen/Qwen2.5-7B", None),
    ],
)
def test_a_family_has_its_smallest_model_as_draft(target: str, draft: str | None) -> None:
    assert known_draft(target) == draft


@pytest.mark.parametrize("digits", [64, 40], ids=["large", "small"])
def test_a_file_without_end_is_cut_at_the_size_that_the_hub_states(
    digits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    def send(url: str, out: Any, **options: Any) -> None:
        nonlocal sent
        for _ in range(9):
            out.write(CHUNK)
            sent += len(CHUNK)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download, "http_get", send)
    files = {"weights": RemoteFile(STATED_BYTES, "0" * digits)}
    with pytest.raises(DownloadError, match="another size than the hub states"):
        fetch_blobs(HubReference("org/model"), "0" * 40, files, lambda what, fraction: None)
    assert sent == 80  # the third chunk would have gone beyond it
    [partial] = tmp_path.rglob("*.incomplete")
    assert partial.stat().st_size == sent


@pytest.mark.parametrize(
    ("name", "most"), [("config.json", MAX_SMALL_BYTES), ("m.GGUF", MAX_FILE_BYTES)]
)
def test_a_file_of_absurd_size_is_refused(name: str, most: int) -> None:
    reference = HubReference("org/small")
    check_sizes(reference, {name: RemoteFile(most, "0" * 64)})
    with pytest.raises(UsageError, match=rf"{name} of hf:org/small has .* at most"):
        check_sizes(reference, {name: RemoteFile(most + 1, "0" * 64)})
