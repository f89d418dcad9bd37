"""OpenAI's Responses API, over HTTP: what it answers, refuses and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from edge_spec.errors import ContextFullError, EdgeSpecError, SessionError
from edge_spec.runtimes.reference import ReferenceSession
from fixtures.server_requests import CHAT, answered, text

RESPONSES = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
}


def post(client: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"input": "hello", "max_output_tokens": 12, **body}
    return answered(client.post(RESPONSES, json=asked))


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Each is checked to be named by its type, and numbered in turn."""
    asked = {"input": "hello", "max_output_tokens": 12, "stream": True, **body}
    response = client.post(RESPONSES, json=asked)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for number, lines in enumerate(told):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def output_text(response: dict[str, Any]) -> str:
    (message,) = response["output"]
    (part,) = message["content"]
    return str(part["text"])


def steady(response: dict[str, Any]) -> dict[str, Any]:
    """Returns what is the same each time that a request is answered: the last digits of a log
    probability depend on how much of the prompt is read at once."""
    output = [{**item, "id": None, "call_id": None} for item in unscored(response["output"])]
    usage = response["usage"] | {"input_tokens_details": None}
    changing = ("id", "created_at", "completed_at", "timings")
    kept = {name: value for name, value in response.items() if name not in changing}
    return {**kept, "output": output, "usage": usage}


def unscored(document: Any) -> Any:
    def without(each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "logprob": 0.0} if "logprob" in each else each

    return json.loads(json.dumps(document), object_hook=without)


def test_a_response_has_the_text_of_a_chat(client: httpx.Client) -> None:
    response = post(client)
    assert output_text(response) == text(client, CHAT)
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = response["usage"]
    assert usage["output_tokens"] == 12
    assert usage["total_tokens"] == usage["input_tokens"] + 12
    counted = answered(client.post(f"{RESPONSES}/input_tokens", json={"input": "hello"}))
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": usage["input_tokens"],
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60},
        {"stop": "zz", "instructions": "be brief", "metadata": {"a": "b"}},
        {"speculative": {"drafter": "none"}},
        {"prediction": {"type": "content", "content": "zzzz"}},
    ],
)
def test_a_stream_tells_what_the_whole_response_does(client: httpx.Client, body: Any) -> None:
    whole = post(client, **body)
    events = streamed(client, **body)
    assert steady(events[-1]["response"]) == steady(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert all(event["response"]["output"] == [] for event in events[:2])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SessionError("the device is gone", remedy="Plug it in."), "server_error"),
        (ContextFullError("it is full", remedy="Shorten it."), "context_length_exceeded"),
    ],
)
def test_a_stream_that_fails_says_so_with_what_there_is(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, error: EdgeSpecError, code: str
) -> None:
    forward, left = ReferenceSession.forward, [3]

    def failing(session: Any, tree: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return forward(session, tree)

    monkeypatch.setattr(ReferenceSession, "forward", failing)
    failed = streamed(client)[-1]
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert error.remedy in response["error"]["message"]
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    left[0] = 3
    assert client.post(RESPONSES, json={"input": "hello"}).status_code >= 400
