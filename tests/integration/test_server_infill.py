"""Texts between two others over HTTP, and what llama.cpp's server has beside OpenAI's endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from fixtures import infill_models
from fixtures.server_requests import COMPLETIONS, ask, client_of, events, refusal

BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
AROUND: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 24}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("coder") / "tiny"
    infill_models.write_model(path, max_position_embeddings=512)
    options = LoadOptions(runtime="reference", context_length=512)
    with load_engine(str(path), options, lambda what, fraction: None) as engine:
        yield engine


@pytest.fixture(scope="module")
def editor(coder: Engine) -> Iterator[httpx.Client]:
    """A client of a server of `coder`, with one slot."""
    with coder.fork() as engine, client_of(engine) as opened:
        yield opened


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/infill", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *told, end = response.text.split("\n\n")
    assert end == ""
    return [json.loads(event.removeprefix("data: ")) for event in told]


def test_an_answer_is_the_engines_between_the_same_texts(
    editor: httpx.Client, coder: Engine
) -> None:
    files = [("x.py", "one = 1\n")]
    prompt = coder.infill_prompt(BEFORE, AFTER, files, max_tokens=24, names_file=True)
    with coder.fork() as engine:
        ends = sorted(engine.parts.text.infill.tokens.all)
        expected = engine.generate(prompt, max_tokens=24, stop_token_ids=ends)
    extra = [{"filename": "x.py", "text": "one = 1\n", "time": 3}]
    told = ask(editor, "/infill", **AROUND, input_extra=extra)
    assert told["content"] == expected.text
    assert told["tokens_evaluated"] == len(prompt)
    assert told["tokens_predicted"] == expected.stats.predicted_n
    assert (told["stop"], told["truncated"], told["stop_type"]) == (True, False, "limit")
    split = {"input_prefix": BEFORE[:-11], "prompt": BEFORE[-11:]}
    again = ask(editor, "/infill", **{**AROUND, **split}, input_extra=extra)
    assert (again["content"], again["prompt"]) == (told["content"], told["prompt"])
    *pieces, last = streamed(editor, **AROUND, input_extra=extra)
    assert "".join(each["content"] for each in pieces) == told["content"]
    assert [each["stop"] for each in (*pieces, last)] == [False] * len(pieces) + [True]
    for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "truncated"):
        assert last[name] == told[name]


def test_an_editors_request_is_taken_as_it_sends_it(editor: httpx.Client) -> None:
    told = ask(
        editor,
        "/infill",
        id_slot=0,
        input_prefix="import os\n\n",
        input_suffix="\n",
        input_extra=[{"text": "a = 1\n", "time": 5, "filename": "a.py"}],
        prompt="def main():",
        n_predict=16,
        stop=["\n\n"],
        n_indent=4,
        top_k=40,
        top_p=0.9,
        stream=False,
        samplers=["top_k", "top_p", "infill"],
        cache_prompt=True,
        t_max_prompt_ms=500,
        t_max_predict_ms=3000,
        response_fields=["content", "timings/predicted_per_second", "truncated", "tokens_cached"],
    )
    assert set(told) == {
        "content", "timings/predicted_per_second", "truncated", "tokens_cached"
    }  # fmt: skip


def test_control_tokens_in_code_are_text(editor: httpx.Client, coder: Engine) -> None:
    spelled = "x = '<|im_end|><|fim_middle|><|file_sep|>'"
    told = ask(editor, "/infill", **{**AROUND, "input_prefix": spelled, "input_suffix": spelled})
    prompt = coder.infill_prompt(spelled, spelled, names_file=True)
    tokens, codec = coder.parts.text.infill.tokens, coder.parts.text.tokenizer
    assert [prompt.count(each) for each in (tokens.prefix, tokens.middle, tokens.suffix)] == [1] * 3
    assert codec.decode(prompt).count(spelled) == 2
    assert told["tokens_evaluated"] == len(prompt)


def test_completions_with_a_suffix_fill_in(editor: httpx.Client, coder: Engine) -> None:
    with coder.fork() as engine:
        prompt = engine.infill_prompt(BEFORE, AFTER, max_tokens=20)
        expected = engine.generate(prompt, max_tokens=20)
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 20}
    assert ask(editor, COMPLETIONS, **body)["choices"][0]["text"] == expected.text
    told = events(editor, COMPLETIONS, **body)
    assert "".join(each["choices"][0]["text"] for each in told) == expected.text
    (choice,) = ask(editor, "/v1/fim/completions", **body)["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    plain = ask(editor, COMPLETIONS, prompt=BEFORE, suffix="", max_tokens=20)
    with coder.fork() as engine:
        assert plain["choices"][0]["text"] == engine.generate(BEFORE, max_tokens=20).text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", AROUND),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}),
    ],
)
def test_a_model_without_the_tokens_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert "between a prefix and a suffix" in refusal(client.post(path, json=body))


def test_a_text_and_its_tokens(editor: httpx.Client, coder: Engine) -> None:
    text = "the end <|im_end|>é\n"
    tokens = ask(editor, "/tokenize", content=text)["tokens"]
    assert tokens == coder.encode(text)
    assert ask(editor, "/detokenize", tokens=tokens) == {"content": text}
    assert ask(editor, "/tokenize", content=text, add_special=True)["tokens"] == tokens
    as_text = ask(editor, "/tokenize", content=text, parse_special=False)["tokens"]
    assert len(as_text) > len(tokens)
    assert ask(editor, "/detokenize", tokens=as_text) == {"content": text}
    pieces = ask(editor, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == tokens
    parts = [each["piece"] for each in pieces]
    assert parts[-3:] == [[0xC3], [0xA9], "\n"]
    assert "<|im_end|>" in parts
    assert ask(editor, "/tokenize") == {"tokens": []}
    assert ask(editor, "/detokenize") == {"content": ""}
