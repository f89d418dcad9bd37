"""OpenAI's Responses API, over HTTP: what it answers, refuses and streams."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from edge_spec.errors import ContextFullError, EdgeSpecError, SessionError
from edge_spec.runtimes.reference import ReferenceSession
from fixtures.server_requests import CHAT, HELLO, answered, ask, refusal, text

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


def test_log_probabilities_are_those_of_a_chat(client: httpx.Client) -> None:
    response = post(client, include=["message.output_text.logprobs"], top_logprobs=2)
    asked = {"messages": HELLO, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    expected = ask(client, CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert unscored(response["output"][0]["content"][0]["logprobs"]) == unscored(expected)
    assert post(client)["output"][0]["content"][0]["logprobs"] == []


def test_where_tokens_came_from_is_told_where_it_is_asked_for(client: httpx.Client) -> None:
    response = post(client, speculative={"tokens": True})
    tokens = response["edge_spec"]["tokens"]
    assert "".join(token["text"] for token in tokens) == output_text(response)
    assert len(tokens) == 12 and all(token["origin"] for token in tokens)
    assert "edge_spec" not in post(client)


def test_what_was_asked_for_is_repeated_and_nothing_is_stored(client: httpx.Client) -> None:
    asked = {
        **{"metadata": {"a": "b"}, "instructions": "be brief", "user": "me", "tools": [TOOL]},
        **{"tool_choice": "none", "parallel_tool_calls": False, "truncation": "disabled"},
        **{"temperature": 0.5, "top_p": 0.5, "max_output_tokens": 3, "top_logprobs": 1},
        **{"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        **{"prompt_cache_key": "k", "safety_identifier": "s", "reasoning": {"effort": "medium"}},
    }
    response = post(client, **asked, store=True, background=False)
    assert {name: response[name] for name in asked} == asked
    assert (response["store"], response["background"]) == (False, False)
    assert response["previous_response_id"] is None


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        },
    ],
)
def test_the_text_has_the_form_that_is_asked_for(client: httpx.Client, choice: Any) -> None:
    """A call is asked for in each of its ways; what it is read as is the engine's affair."""
    schema = {"type": "json_schema", "name": "n", "schema": TOOL["parameters"], "strict": True}
    response = post(client, text={"format": schema}, max_output_tokens=60)
    assert json.loads(output_text(response))["n"] in (1, 2)
    assert response["status"] == "completed"
    asked = {"tools": [TOOL, TOOL | {"name": "other"}], "tool_choice": choice}
    response = post(client, **asked, parallel_tool_calls=False, max_output_tokens=120)
    assert response["status"] == "completed"
    assert '"n": ' in json.dumps(response["output"]).replace("\\", "")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id .*whole conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation .*whole conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
        ({"background": True}, "background .*stream the answer"),
        ({"tools": [TOOL, {"type": "mcp"}]}, r"tools\[1\].type is mcp: .*client runs them"),
        ({"tools": [{"type": "web_search"}]}, "tools has no function: .*no tools of its own"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, r"tools\[0\].type is custom: "),
        ({"tool_choice": {"type": "file_search"}, "tools": [TOOL]}, "tool_choice: .*file_search"),
        ({"tool_choice": "required"}, "tool_choice asks for a call: send tools"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.json_schema is"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "text.format: .*at #/type",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "regex": "a"},
            "regex is a form beside that of text.format",
        ),
        ({"reasoning": {"efort": "high"}}, "reasoning.efort .*: is effort meant"),
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\]: .*send the item itself"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\]: items of type computer_call"),
        ({"input": [{"role": "tool", "content": "a"}]}, r"input\[0\].role: \"tool\" should be"),
        ({"input": [{"type": "function_call", "name": "f"}]}, r"input\[0\].call_id is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            r"input\[0\].content\[0\]: the model reads text",
        ),
        ({"messages": HELLO}, "messages belongs to POST /v1/chat/completions: send input"),
        ({"n": 2}, "n: 2 should be 1"),
        ({"metadata": {"a": 1}}, "metadata.a: 1 should be a valid string"),
        ({"truncation": "auto"}, "truncation: \"auto\" should be 'disabled'"),
        ({"max_output_tokens": 0}, "max_output_tokens: 0 should be from 1"),
    ],
)
def test_what_is_refused_is_told_in_one_line(client: httpx.Client, body: Any, told: str) -> None:
    message = refusal(client.post(RESPONSES, json={"input": "hello", **body}))
    assert re.match(told, message), message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "resp_1"),
        ("DELETE", "resp_1"),
        ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"),
        ("POST", "compact"),
    ],
)
def test_no_response_of_earlier_is_there(client: httpx.Client, method: str, path: str) -> None:
    body = {"json": {}} if method == "POST" else {}
    response = client.request(method, f"{RESPONSES}/{path}", **body)
    assert response.status_code == 404
    assert "No response is stored: " in response.json()["error"]["message"]


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


def test_the_address_is_found_without_v1(client: httpx.Client) -> None:
    for path in ("/responses", "/v1/v1/responses"):
        assert client.post(path, json={"input": "a", "max_output_tokens": 1}).status_code == 200
