"""Anthropic's Messages API, as the client that Anthropic publishes uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from fixtures.server_requests import HELLO

anthropic: Any = pytest.importorskip("anthropic")

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": HELLO}


@pytest.fixture(scope="module")
def url(served_once: Engine) -> Iterator[str]:
    options = ServerOptions(port=0, parallel=2, api_key="secret")
    with served_once.fork() as engine, RunningServer(engine, options) as running:
        yield running.url


@pytest.fixture
def user(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as opened:
        yield opened


@pytest.fixture
def expected(served: Engine) -> str:
    return served.chat(HELLO, max_tokens=20).text


def test_an_answer(user: Any, expected: str) -> None:
    message = user.messages.create(**ASKED)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == expected
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "max_tokens")
    usage = message.usage
    assert usage.output_tokens == 20
    counted = user.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_a_stream(user: Any, expected: str) -> None:
    with user.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == expected
        message = stream.get_final_message()
    assert message.content[0].text == expected
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)


def test_events_of_a_stream(user: Any) -> None:
    raw = user.messages.with_raw_response.create(**ASKED, stream=True).http_response
    kinds = [event["type"] for event in events_of("".join(raw.iter_text()))]
    deltas = ["content_block_delta"] * kinds.count("content_block_delta")
    assert kinds == [
        *("message_start", "ping", "content_block_start", *deltas, "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def events_of(stream: str) -> list[dict[str, Any]]:
    """Each is two lines, of which the first names what the second is."""
    *told, end = stream.split("\n\n")
    assert end == ""
    events = []
    for name, data in (each.split("\n") for each in told):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("status", "asked", "told"),
    [
        (400, {"max_tokens": -1}, "max_tokens: -1 should be"),
        (400, {"messages": [{"role": "user", "content": "a" * 3000}]}, "maximum context length"),
        (400, {"tools": [{**TOOL, "strict": True, "input_schema": {"type": "x"}}]}, "tools: "),
        (400, {"tool_choice": {"type": "any"}}, "tool_choice asks for a call: send tools, too."),
        (400, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "names g, which"),
        (400, {"extra_body": {"chat_template_kwargs": {"tools": []}}}, "kwargs has tools: send"),
        (
            401,
            {"extra_headers": {"x-api-key": anthropic.Omit(), "Authorization": "Bearer no"}},
            "The API key is missing or wrong.",
        ),
        (404, {"model": "claude"}, "There is no model 'claude' here."),
        (413, {"system": "a" * (3 << 20)}, "The body has more than"),
        (415, {"extra_headers": {"Content-Type": "text/plain"}}, "The body has to be JSON"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_in_its_form(
    user: Any, status: int, asked: dict[str, Any], told: str, stream: bool
) -> None:
    with pytest.raises(anthropic.APIStatusError, match=told) as refused:
        user.messages.create(**{**ASKED, **asked}, stream=stream)
    assert refused.value.status_code == status
    document = refused.value.response.json()
    assert document["type"] == "error"
    assert list(document["error"]) == ["type", "message"]
    assert document["error"]["type"] == KINDS.get(status, "invalid_request_error")
