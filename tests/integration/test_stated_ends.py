"""Every token at which a directory or a file says that texts end is one, in all runtimes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec import SamplingParams, load
from edge_spec.errors import ModelFileError
from edge_spec.exporters.reader import open_checkpoint

END_OF_TEXT, START, END = 262, 263, 264  # of the tiny models
NAMED = {"added_tokens_decoder": {"264": {"content": "<|im_end|>", "special": True}}}


def directory(hf: Callable[..., Path], out: Path, **files: Any) -> Path:
    """A tiny model with these JSON files, of config.json what is changed."""
    out.mkdir()
    for file in hf().iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        path = out / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **content} if isinstance(content, dict) else content))
    return out


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": END_OF_TEXT}}, [END_OF_TEXT]),
        ({"config": {"eos_token_id": [END, END_OF_TEXT]}}, [END_OF_TEXT, END]),
        (
            {
                "config": {"eos_token_id": END_OF_TEXT},
                "tokenizer_config": {"eos_token": {"content": "<|im_end|>"}, **NAMED},
            },
            [END_OF_TEXT, END],
        ),
        (
            {
                "config": {"eos_token_id": END_OF_TEXT},
                "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}},
            },
            [END_OF_TEXT, END],
        ),
        ({"generation_config": {"eos_token_id": None}}, [END]),
        ({"generation_config": {"eos_token_id": END_OF_TEXT}}, [END_OF_TEXT, END]),
        # A number that a model of another vocabulary left: "A" is no special token.
        (
            {"generation_config": {"eos_token_id": END}, "config": {"eos_token_id": 65}},
            [END],
        ),
        (
            {"config": {"eos_token_id": END, "text_config": {"eos_token_id": END_OF_TEXT}}},
            [END_OF_TEXT, END],
        ),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<none>"}}, []),
    ],
)
def test_a_directory_ends_where_any_of_its_files_says(
    hf: Callable[..., Path], tmp_path: Path, files: dict[str, Any], expected: list[int]
) -> None:
    assert list(open_checkpoint(directory(hf, tmp_path / "model", **files)).eos_ids) == expected


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"config": {"eos_token_id": "</s>"}}, r"config\.json: eos_token_id is '</s>'"),
        ({"config": {"eos_token_id": True}}, r"config\.json: eos_token_id is True"),
        ({"generation_config": {"eos_token_id": 2.0}}, r"generation_config\.json: eos_token_id"),
        ({"generation_config": {"eos_token_id": [[2]]}}, "expected a token's number"),
        ({"tokenizer_config": {"eos_token": 5}}, r"tokenizer_config\.json: eos_token is 5"),
        ({"special_tokens_map": {"eos_token": ["</s>"]}}, "expected a token's text"),
        ({"special_tokens_map": []}, "holds no JSON object"),
    ],
)
def test_what_is_no_token_is_told_with_its_file(
    hf: Callable[..., Path], tmp_path: Path, files: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelFileError, match=told):
        open_checkpoint(directory(hf, tmp_path / "model", **files))


@pytest.mark.parametrize("runtime", ["llamacpp", "ort"])
def test_an_answer_ends_at_an_end_that_only_the_tokenizer_names(
    hf: Callable[..., Path], tmp_path: Path, runtime: str
) -> None:
    if runtime == "llamacpp":
        pytest.importorskip("llama_cpp")
    named = {"eos_token": "<|im_start|>"}  # known by nothing else
    model = directory(hf, tmp_path / "model", tokenizer_config=named)
    with load(str(model), runtime=runtime, threads=1) as llm:
        assert set(llm.parts.text.eos_ids) == {END, START, END_OF_TEXT}
        for token in llm.parts.text.eos_ids:
            sampling = SamplingParams(logit_bias={token: 100.0})
            result = llm.generate("the", max_tokens=8, sampling=sampling)
            assert (result.text, result.finish_reason, len(result.tokens)) == ("", "stop", 1)


def test_a_file_ends_where_any_of_its_keys_says(tiny: ModuleType, tmp_path: Path) -> None:
    def ends(**keys: int) -> tuple[int, ...]:
        path = tiny.write_gguf(tiny.build(), tmp_path / "model.gguf", **keys)
        return open_checkpoint(path).eos_ids

    key = "tokenizer__ggml__{}_token_id".format
    assert ends() == (END,)
    assert ends(**{key("eot"): 5, key("eom"): 6}) == (5, 6, END)
    assert ends(**{key("fim_pad"): 5, key("fim_rep"): 6, key("fim_sep"): 7}) == (END, 5, 6, 7)
    assert ends(**{key("eos"): 9999}) == ()  # as in llama.cpp, a number that is no token's
