"""Requests that are wrong: the status and the body that OpenAI's clients expect, and the server
stays up."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from edge_spec.apps.server.errors import api_error
from edge_spec.errors import (
    EdgeSpecError,
    MissingDependencyError,
    SessionError,
    UnsupportedModelError,
    UsageError,
    install,
)
from edge_spec.runtimes.reference import ReferenceSession
from fixtures.server_requests import CHAT, HELLO


def called_with(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("messages", [None, [], "hello", [1], [{}], [{"role": "user"}], [{"content": "a"}]]),
        ("messages", [[{"role": "wizard", "content": "a"}], [{"role": "user", "content": 1}]]),
        ("messages", [[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]]),
        ("messages", [[{"role": "user", "content": None}]]),
        ("max_tokens", [0, -3, 1.5, "5", True, 2**40]),
        ("max_completion_tokens", [0, "5"]),
        ("temperature", [-0.1, 2.1, "hot", True]),
        ("top_p", [0, 1.1]),
        ("top_k", [-2, 0.5]),
        ("min_p", [-0.1, 1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("logit_bias", [{"a": 1}, {"1": 101}, [1], {"1": "x"}]),
        ("seed", [1.5, "1", 2**70]),
        ("stop", [1, [1], ["a"] * 257, {"a": 1}]),
        ("n", [0, 17, "2"]),
        ("logprobs", ["yes", 3]),
        ("top_logprobs", [21, -1, 2]),  # 2 without logprobs
        ("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}]),
        ("tools", ["f", [{}], [{"type": "function", "function": {"name": "a b"}}]]),
        ("tool_choice", ["maybe", {"type": "function", "function": {"name": "g"}}, "required"]),
        ("parallel_tool_calls", ["yes", 1]),
        ("functions", [[{"name": "f"}]]),
        ("prompt", ["a"]),
        ("modalities", [["audio"]]),
        ("stream", ["yes", 1]),
        ("stream_options", [True]),
        ("session_id", [1, "x" * 300]),
        ("speculative", ["auto", {"tokens": 1}, {"drafter": 3}]),
    ],
)
def test_a_field_of_a_wrong_type_or_range_is_named(
    client: httpx.Client, field: str, values: list[Any]
) -> None:
    for value in values:
        body = {"messages": HELLO, "max_tokens": 1, field: value}
        assert refusal(client.post(CHAT, json=body), 400)["param"] == field, value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"logit_bias": {"999999": 1}}, "outside the vocabulary"),
        ({"speculative": {"drafter": "oracle"}}, "no drafter called 'oracle'"),
        ({"speculative": {"drafter": "draft-model"}}, "Leave speculative.drafter out"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "the context holds"),
        (called_with("[" * 100_000), "nested too deeply"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                }
            },
            "answers cannot be held to type at #/type",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
                }
            },
            "no answer can have this form",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_told(
    client: httpx.Client, change: dict[str, Any], told: str, stream: bool
) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "stream": stream, **change}
    error = refusal(client.post(CHAT, json=body), 400)
    assert told in error["message"]
    if "context" in told:
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is" in error["message"]  # as LiteLLM looks for
    assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    ],
)
def test_a_body_that_is_no_request_is_refused(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    refusal(client.post(CHAT, content=body, headers=headers), 400)


@pytest.mark.parametrize("where", ["content", "name", "tool", "stop", "schema", "model"])
def test_half_a_character_is_no_fault_of_the_server(client: httpx.Client, where: str) -> None:
    half = "a\\ud800"
    fields = {
        "content": f'"messages": [{{"role": "user", "content": "{half}"}}]',
        "name": f'"messages": [{{"role": "user", "content": "a", "name": "{half}"}}]',
        "tool": f'"tools": [{{"type": "function", "function": {{"name": "f", '
        f'"parameters": {{"title": "{half}"}}}}}}]',
        "stop": f'"stop": "{half}"',
        "schema": '"response_format": {"type": "json_schema", "json_schema": {"schema": '
        f'{{"const": "{half}"}}}}}}',
        "model": f'"model": "{half}"',
    }
    rest = (
        "" if '"messages"' in fields[where] else '"messages": [{"role": "user", "content": "a"}],'
    )
    body = f'{{{rest} {fields[where]}, "max_tokens": 2}}'.encode()
    response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text


@pytest.mark.parametrize(
    "error",
    [
        UsageError("it is wrong", remedy="Name it with --draft MODEL."),
        UnsupportedModelError("it is wrong", remedy="Use `generate --raw`."),
        MissingDependencyError("it is wrong", remedy=install("grammar")),
        SessionError("it is wrong", remedy="Give a shorter --context."),
    ],
)
def test_no_client_is_told_of_the_command_line(error: EdgeSpecError) -> None:
    told = api_error(error)
    assert told.message.startswith("it is wrong.")
    assert "--" not in told.message and "pip" not in told.message
    assert ("runs the server" in told.message) == (told.status >= 500)


def test_a_model_that_fails_is_told_and_the_next_answer_works(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ReferenceSession.forward
    left = [3]

    def failing(session: Any, tree: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise SessionError("the device is gone", remedy="Plug it in.")
        return forward(session, tree)

    body = {"messages": HELLO, "max_tokens": 9}
    monkeypatch.setattr(ReferenceSession, "forward", failing)
    error = refusal(client.post(CHAT, json=body), 500)
    assert error["message"] == "the device is gone. Plug it in."
    left[0] = 3
    streamed = client.post(CHAT, json={**body, "stream": True})
    assert streamed.status_code == 200
    *written, failed, done, end = streamed.text.split("\n\n")
    assert "Plug it in." in failed and (done, end) == ("data: [DONE]", "")
    told = "".join(_content(event) for event in written)
    monkeypatch.undo()
    whole = client.post(CHAT, json=body)
    assert whole.status_code == 200
    assert told and whole.json()["choices"][0]["message"]["content"].startswith(told)


def _content(event: str) -> str:
    choices = json.loads(event.removeprefix("data: "))["choices"]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_unknown_paths_and_methods_have_the_same_form(client: httpx.Client) -> None:
    refusal(client.get("/v1/nothing"), 404)
    refusal(client.get("/static/../__init__.py"), 404)
    refusal(client.get("/static/%2e%2e%2f__init__.py"), 404)
    refusal(client.get(CHAT), 405)
    refusal(client.delete("/v1/models"), 405)
