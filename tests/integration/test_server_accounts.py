"""Log probabilities and counts of the server: by token, streamed as whole, drafted as plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from edge_spec.runtimes.reference import ReferenceSession
from fixtures.echo_model import open_echo
from fixtures.server_requests import (
    CHAT,
    COMPLETIONS,
    ask,
    client_of,
    events,
    figure,
    let_until_free,
)

Serve = Callable[..., httpx.Client]
TEXT = "one two three, one two three: caf\u00e9 \U0001f999 three"
COUNTED = "edge_spec_predicted_tokens_total"


@pytest.fixture(scope="module")
def echo() -> Iterator[httpx.Client]:
    """A model that answers with the message, a byte a token."""
    with (
        open_echo() as engine,
        client_of(engine) as client,
    ):
        yield client


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    return events(client, path, **body, stream_options={"include_usage": True})


def listed(choices: list[dict[str, Any]]) -> list[Any]:
    return [
        each for choice in choices for each in (choice["logprobs"] or {"content": []})["content"]
    ]


@pytest.mark.parametrize("drafter", ["none", "suffix"])
@pytest.mark.parametrize(
    ("asked", "text", "reason", "num_tokens"),
    [
        ({}, TEXT, "stop", len(TEXT.encode()) + 1),
        ({"stop": ["two three:"]}, TEXT.partition("two three:")[0], "stop", 19),
        ({"stop": [":"], "max_tokens": 29}, TEXT.partition(":")[0], "stop", 28),
        ({"stop": [":"], "max_tokens": 28}, TEXT.partition(":")[0], "length", 28),
        ({"stop": ["\U0001f999"]}, TEXT.partition("\U0001f999")[0], "stop", 36),
        ({"max_tokens": 1}, "o", "length", 1),
        ({"stop": ["o"]}, "", "stop", 0),
    ],
)
def test_tokens_are_those_of_the_text(
    echo: httpx.Client, drafter: str, asked: Any, text: str, reason: str, num_tokens: int
) -> None:
    """An end token is counted, and has no place in the text."""
    body = {"messages": [{"role": "user", "content": TEXT}], "logprobs": True, "top_logprobs": 2}
    body |= {"speculative": {"drafter": drafter}, **asked}
    before = figure(echo, COUNTED)
    answer = ask(echo, CHAT, **body)
    assert figure(echo, COUNTED) - before == num_tokens
    assert answer["usage"]["completion_tokens"] == answer["timings"]["predicted_n"] == num_tokens
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
    content = choice["logprobs"]["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == text
    assert [each["token"] for each in content if len(each["token"]) == 1] == [
        each for each in text if each.isascii()
    ]
    for each in content:
        own = {name: each[name] for name in ("token", "logprob", "bytes")}
        assert own in each["top_logprobs"] and len(each["top_logprobs"]) == 2
    *told, last = streamed(echo, CHAT, **body)
    assert listed([choice for event in told for choice in event["choices"]]) == content
    raw, shown = b"", ""
    for choice in (choice for event in told for choice in event["choices"]):
        raw += bytes(byte for each in listed([choice]) for byte in each["bytes"])
        shown += choice["delta"].get("content", "")
        assert raw.decode("utf-8", "ignore") == shown  # but for the begun character
    assert last["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("stop", [[], ["three:"]])
def test_a_completion_lists_its_tokens(echo: httpx.Client, stop: list[str]) -> None:
    prompt = f"u:{TEXT}<eos>a:"
    body = {"prompt": prompt, "logprobs": 3, "stop": stop, "speculative": {"drafter": "suffix"}}
    answer = ask(echo, COMPLETIONS, **body)
    [choice] = answer["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert text == (TEXT.partition(*stop)[0] if stop else TEXT)
    assert len(told["tokens"]) == answer["usage"]["completion_tokens"] - (not stop)
    for token, offset, logprob, top in zip(
        told["tokens"],
        told["text_offset"],
        told["token_logprobs"],
        told["top_logprobs"],
        strict=True,
    ):
        assert len(top) == 3 and top[token] == logprob == max(top.values())
        assert token.startswith("bytes:\\x") or text[offset] == token
    pieces = [
        choice["logprobs"]
        for event in streamed(echo, COMPLETIONS, **body)
        for choice in event["choices"]
        if choice["logprobs"]
    ]
    for name, whole in told.items():
        assert [each for piece in pieces for each in piece[name]] == whole


def test_several_choices_of_several_prompts_are_counted_once_each(serve: Serve) -> None:
    client = serve()
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 30, "temperature": 1, "seed": 3}
    body |= {"stop": list("aeinorst "), "logprobs": 0}
    before = figure(client, COUNTED)
    answer = ask(client, COMPLETIONS, **body)
    ends = sum(choice["finish_reason"] == "stop" for choice in answer["choices"])
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert len(lengths) == 4 and ends > 0
    assert answer["usage"]["completion_tokens"] == sum(lengths) == figure(client, COUNTED) - before
    assert streamed(client, COMPLETIONS, **body)[-1]["usage"]["completion_tokens"] == sum(lengths)


def test_an_answer_that_fails_or_is_left_is_counted(
    serve: Serve, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(parallel=1)
    gate.let(3)
    body = {"prompt": "abc", "max_tokens": 900, "speculative": {"drafter": "none", "tokens": True}}
    with client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        next(response.iter_lines())
    let_until_free(client, gate)
    gate.end()
    left = figure(client, COUNTED)
    assert 0 < left < 900
    forward, rounds = ReferenceSession.forward, iter(range(5))

    def failing(session: ReferenceSession, tree: Any) -> Any:
        if next(rounds, None) is None:
            raise RuntimeError("the device is gone")
        return forward(session, tree)

    monkeypatch.setattr(ReferenceSession, "forward", failing)
    *told, error = streamed(client, COMPLETIONS, **body)
    assert "error" in error and sum(len(event["edge_spec"]["tokens"]) for event in told) == 5
    assert figure(client, COUNTED) == left + 5
