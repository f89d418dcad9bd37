"""Requests as programs send them that people point at a server of their own: editors, chat pages,
agents and libraries. Each is theirs in our words: what matters is its members and their forms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.cli.options import SamplingOptions
from fixtures.server_requests import CHAT, COMPLETIONS

ASK: dict[str, Any] = {"role": "user", "content": "hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
BRIEF = {"role": "system", "content": "Be brief."}
USAGE = {"include_usage": True}
FIM = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n<|fim_middle|>"
FIM_STOPS = [
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8"),
    *("```", "\n\n\n", "\ndef ", "\nclass ", "\nasync ", "\nfunction ", "\n\n\n\n"),
]
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"path": {"type": "string", "description": "from the root"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
}
AGENT = [
    *(BRIEF, PARTS, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
    {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
    {"role": "assistant", "content": "", "reasoning_content": "hm"},
    PARTS,
]

# What sends it; where to, and what.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "continue-edit": (
        CHAT,
        {
            "messages": [ASK],
            "model": "tiny",
            "max_tokens": 8,
            "temperature": 0.01,
            "stream": True,
            "prediction": {"type": "content", "content": "def add(a, b):\n"},
        },
    ),
    "continue-autocomplete": (
        COMPLETIONS,
        {
            "model": "tiny",
            "max_tokens": 8,
            "temperature": 0.01,
            "stream": True,
            "stop": FIM_STOPS,
            "prompt": FIM,
        },
    ),
    "zed-agent": (
        CHAT,
        {
            "model": "tiny",
            "messages": AGENT,
            "stream": True,
            "stream_options": USAGE,
            "max_completion_tokens": 8,
            "temperature": 1.0,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "tools": [READ],
            "prompt_cache_key": "thread-1",
            "reasoning_effort": "medium",
        },
    ),
    "open-webui-chat": (
        CHAT,
        {
            "stream": True,
            "model": "tiny",
            "messages": [BRIEF, ASK],
            "stream_options": USAGE,
            "max_tokens": -1,
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0,
            "seed": 7,
            "stop": ["</answer>", ""],
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "repeat_penalty": 1.1,
            "logit_bias": {},
            "user": "someone",
        },
    ),
    "sillytavern-text": (
        COMPLETIONS,
        {
            "prompt": "Ann: hello\nBob:",
            "model": "tiny",
            "max_new_tokens": 8,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.5,
            "typical_p": 1,
            "typical": 1,
            "sampler_seed": -1,
            "seed": -1,
            "min_p": 0,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "top_k": 40,
            "skew": 0,
            "min_tokens": 0,
            "add_bos_token": True,
            "smoothing_factor": 0,
            "smoothing_curve": 1,
            "dry_allowed_length": 2,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_sequence_breakers": '["\\n"]',
            "dry_penalty_last_n": 0,
            "max_tokens_second": 0,
            "stopping_strings": ["\nAnn:"],
            "stop": ["\nAnn:"],
            "truncation_length": 2048,
            "ban_eos_token": False,
            "skip_special_tokens": True,
            "include_reasoning": True,
            "top_a": 0,
            "tfs": 1,
            "mirostat_mode": 0,
            "mirostat_tau": 5,
            "mirostat_eta": 0.1,
            "custom_token_bans": "",
            "banned_strings": [],
            "api_type": "generic",
            "api_server": "http://127.0.0.1:8080",
            "xtc_threshold": 0.1,
            "xtc_probability": 0,
            "nsigma": 0,
            "stream": True,
        },
    ),
    "vercel-ai-sdk": (
        CHAT,
        {
            "model": "tiny",
            "messages": [BRIEF, ASK],
            "max_tokens": 8,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}},
                    "strict": True,
                    "name": "response",
                },
            },
            "tools": None,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "langchain-js": (
        CHAT,
        {
            "model": "tiny",
            "temperature": 0,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "logprobs": None,
            "n": 1,
            "stream": False,
            "max_tokens": 8,
            "parallel_tool_calls": None,
            "messages": [{"role": "developer", "content": "Be brief."}, ASK],
        },
    ),
    "codex": (
        CHAT,
        {
            "model": "tiny",
            "messages": AGENT,
            "stream": True,
            "max_tokens": 8,
            "tools": [READ | {"function": {**READ["function"], "strict": False}}],
            "tool_choice": {"type": "function", "function": {"name": "read_file"}},
            "store": False,
            "metadata": {"session": "1"},
            "service_tier": "auto",
        },
    ),
}
# What their own HTTP clients add, and editors that send a key in every form that they know.
HEADERS = {
    "Authorization": "Bearer undefined",
    "api-key": "",
    "x-api-key": "none",
    "User-Agent": "OpenAI/JS 6.49.0",
    "X-Stainless-Lang": "js",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Timeout": "600",
    "OpenAI-Organization": "org-1",
    "HTTP-Referer": "https://openwebui.com/",
    "X-OpenWebUI-User-Name": "Ann",
    "Accept": "application/json, text/event-stream",
    "Accept-Encoding": "gzip, deflate, br, zstd",
}


@pytest.fixture(scope="module")
def client(served_once: Engine) -> Iterator[httpx.Client]:
    options = ServerOptions(port=0, parallel=1, sampling=SamplingOptions(8))
    with (
        served_once.fork() as engine,
        RunningServer(engine, options) as running,
        httpx.Client(base_url=running.url, timeout=60, headers=HEADERS) as opened,
    ):
        yield opened


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Read as the simplest clients do: line by line, each to the end of its JSON."""
    lines = [line for line in response.text.split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not any("error" in event for event in found), found
    return found


def written(choice: Mapping[str, Any]) -> str:
    """The text of a choice, whole or a piece of it."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice["delta"]
    calls = message.get("tool_calls") or []
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    return (message.get("content") or "") + arguments


@pytest.mark.parametrize("name", SHAPES)
def test_the_request_of_a_client_is_answered_streamed_as_whole(
    client: httpx.Client, name: str
) -> None:
    path, body = SHAPES[name]
    body = {**body, "temperature": 0, "max_tokens": 8}
    response = client.post(path, json={**body, "stream": False, "stream_options": None})
    assert response.status_code == 200, response.text
    (whole,) = response.json()["choices"]
    assert whole["finish_reason"] in ("stop", "length", "tool_calls")
    told = events(client.post(path, json={**body, "stream": True}))
    choices = [choice for event in told for choice in event["choices"]]
    assert "".join(map(written, choices)) == written(whole)
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    if body.get("stream_options"):
        assert told[-1]["choices"] == [] and told[-1]["usage"]["total_tokens"] > 0
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
    assert len({event["id"] for event in told}) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_the_request_of_a_client_is_taken_as_it_is(client: httpx.Client, name: str) -> None:
    path, body = SHAPES[name]
    if body.get("max_tokens") == -1:  # to the end of the context, which is long
        body = {**body, "stop": [*body["stop"], *map(chr, range(97, 123))]}
    response = client.post(path, json=body)
    assert response.status_code == 200 and '"error"' not in response.text, response.text


def test_models_are_listed_as_clients_look_for_them(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (entry,) = listed["data"]
    assert entry["object"] == "model" and isinstance(entry["created"], int) and entry["id"]
    assert client.head("/").status_code == client.get("/v1/models/").status_code == 200
