"""What the server answers: the engine's own texts, in the forms that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from edge_spec import Engine, SamplingParams
from edge_spec.apps.server import openai
from fixtures.server_requests import CHAT, COMPLETIONS, HELLO, ask, events

Serve = Callable[..., httpx.Client]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(serve: Serve) -> httpx.Client:
    return serve()


def test_a_greedy_answer_is_the_engines(client: httpx.Client, served: Engine) -> None:
    fork = served.fork()
    expected = fork.chat(HELLO, max_tokens=40)
    answer = ask(client, CHAT, model="tiny", messages=HELLO, max_tokens=40, temperature=0)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == "length" == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens"] == expected.stats.prompt_n
    told = events(client, CHAT, messages=HELLO, max_completion_tokens=40, max_tokens=3)
    first, *others = [event["choices"][0] for event in told]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["delta"].get("content", "") for each in others) == expected.text
    assert [each["finish_reason"] for each in others] == [None] * (len(others) - 1) + ["length"]
    fork.close()


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108]])
def test_a_completion_continues_text_or_tokens(
    client: httpx.Client, served: Engine, prompt: Any
) -> None:
    with served.fork() as fork:
        expected = fork.generate(prompt, max_tokens=20).text
    body = {"prompt": prompt, "max_tokens": 20}
    assert ask(client, COMPLETIONS, **body)["choices"][0]["text"] == expected
    told = events(client, COMPLETIONS, **body)
    assert "".join(event["choices"][0]["text"] for event in told) == expected
    assert told[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompts", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_several_prompts_have_their_choices_in_order(client: httpx.Client, prompts: Any) -> None:
    alone = [
        ask(client, COMPLETIONS, prompt=prompt, max_tokens=8)["choices"][0]["text"]
        for prompt in prompts
    ]
    answer = ask(client, COMPLETIONS, prompt=prompts, max_tokens=8, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["usage"]["prompt_tokens"] == 4


def test_every_sampling_field_arrives(client: httpx.Client, served: Engine) -> None:
    fields = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "seed": 5,
    }
    params = SamplingParams(**fields, logit_bias={101: -50.0})  # type: ignore[arg-type]
    with served.fork() as fork:
        expected = fork.generate("abc", max_tokens=20, sampling=params).text
        plain = fork.generate("abc", max_tokens=20, sampling=SamplingParams(0.7, seed=5)).text
    body = {"prompt": "abc", "max_tokens": 20, "user": "me"}
    answer = ask(client, COMPLETIONS, **body, **fields, logit_bias={"101": -50})
    assert answer["choices"][0]["text"] == expected != plain


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_call_is_one(client: httpx.Client, choice: Any) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 120}
    body["parallel_tool_calls"] = False
    (answer,) = ask(client, CHAT, **body)["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert 1 <= json.loads(call["function"]["arguments"])["days"] <= 9
    told = [event["choices"][0] for event in events(client, CHAT, **body)]
    first, *others = [one for each in told for one in each["delta"].get("tool_calls", ())]
    assert (first["index"], first["type"]) == (0, "function") and first["id"]
    assert first["function"]["name"] == "weather"
    assert all(set(each) == {"index", "function"} for each in others)
    arguments = "".join(each["function"]["arguments"] for each in (first, *others))
    assert arguments == call["function"]["arguments"]
    assert told[-1]["finish_reason"] == "tool_calls"


def test_arguments_of_a_required_call_are_an_object_whatever_its_schema(
    client: httpx.Client,
) -> None:
    """The schema has no type, and the tokens that begin an object are as unlikely as can be."""
    parameters = {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    body = {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": 80,
        "temperature": 0,
        "logit_bias": {str(ord("{")): -100, str(ord('"')): 100},
    }
    (choice,) = ask(client, CHAT, **body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert choice["finish_reason"] == "tool_calls"


def test_answers_that_may_call_tools_do_not_depend_on_drafting(client: httpx.Client) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 60}
    for choice in ("auto", "required"):
        texts = []
        for drafter in ("none", "auto", "recycling"):
            speculative = {"drafter": drafter, "tokens": True}
            answer = ask(client, CHAT, **body, tool_choice=choice, speculative=speculative)
            texts.append([token["id"] for token in answer["edge_spec"]["tokens"]])
        assert texts[0] == texts[1] == texts[2]


def test_a_cut_call_keeps_its_name_and_says_so(client: httpx.Client) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 45}
    (choice,) = ask(client, CHAT, **body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("length", "weather")
    assert call["function"]["arguments"].startswith("{")


def test_tokens_tell_their_origin_and_figures_their_rates(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 30, "speculative": {"tokens": True}, "logprobs": True}
    answer = ask(client, CHAT, **body)
    tokens = answer["edge_spec"]["tokens"]
    assert all(set(token) <= {"id", "text", "origin", "drafter"} for token in tokens)
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["message"]["content"]
    told = events(client, CHAT, **body)
    streamed = [token for event in told[1:] for token in event["edge_spec"]["tokens"]]
    assert [token["id"] for token in streamed] == [token["id"] for token in tokens]
    assert {token["origin"] for token in streamed} <= {"plain", "accepted", "recovered", "bonus"}
    counts = [event["edge_spec"]["predicted_n"] for event in told[1:]]
    assert counts == sorted(counts) and counts[-1] == 30
    assert told[-1]["timings"]["predicted_n"] == 30


@pytest.mark.parametrize(("path", "reply"), [(CHAT, "ChatReply"), (COMPLETIONS, "CompletionReply")])
def test_a_reply_is_put_together_beside_the_loop_that_serves_others(
    client: httpx.Client, path: str, reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_reply = getattr(openai, reply)
    document = of_reply.document

    def beside(self: Any, results: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return document(self, results)

    monkeypatch.setattr(of_reply, "document", beside)
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "ab"}
    assert ask(client, path, **asked, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_drafting_can_be_turned_off_for_a_request(client: httpx.Client) -> None:
    body = {"prompt": "ab ab ab ab ab ab", "max_tokens": 20}
    off = ask(client, COMPLETIONS, **body, speculative={"drafter": "none"})
    assert off["timings"]["plain_reasons"] == {"off": 20}
    on = ask(client, COMPLETIONS, **body)
    assert "off" not in on["timings"]["plain_reasons"]
    assert on["choices"] == off["choices"]


def test_a_conversation_goes_on_in_its_slot(client: httpx.Client) -> None:
    first = ask(client, CHAT, messages=HELLO, max_tokens=10)
    reply = first["choices"][0]["message"]
    ask(client, CHAT, messages=[{"role": "user", "content": "something else"}], max_tokens=10)
    longer = [*HELLO, reply, {"role": "user", "content": "go on"}]
    second = ask(client, CHAT, messages=longer, max_tokens=10)
    # Up to the last token of the answer, which was never scored.
    assert (
        second["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= (first["usage"]["prompt_tokens"])
    )
    assert second["timings"]["cache_n"] > 0


def test_conversations_at_once_do_not_mix(serve: Serve, served: Engine) -> None:
    client = serve(parallel=3)
    prompts = [f"{letter} {letter} {letter}" for letter in "abcdefgh"]
    with served.fork() as fork:
        expected = [fork.generate(prompt, max_tokens=30).text for prompt in prompts]

    def streamed(prompt: str) -> str:
        told = events(client, COMPLETIONS, prompt=prompt, max_tokens=30)
        return "".join(event["choices"][0]["text"] for event in told)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            assert list(threads.map(streamed, prompts)) == expected


def test_figures_for_prometheus_count_what_happened(client: httpx.Client) -> None:
    ask(client, CHAT, messages=HELLO, max_tokens=12)
    client.post(CHAT, json={})
    client.get("/nowhere")
    figures = client.get("/metrics").text
    for line in (
        'edge_spec_requests_total{path="/v1/chat/completions",status="200"} 1.0',
        'edge_spec_requests_total{path="/v1/chat/completions",status="400"} 1.0',
        'edge_spec_requests_total{path="other",status="404"} 1.0',
        "edge_spec_predicted_tokens_total 12.0",
        "edge_spec_slots 2.0",
        "edge_spec_slots_busy 0.0",
        "edge_spec_queue_length 0.0",
        "edge_spec_time_to_first_token_seconds_count 1.0",
        "edge_spec_time_per_token_seconds_count 1.0",
    ):
        assert line in figures.splitlines()
