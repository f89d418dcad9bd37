"""Thoughts of a model beside its text, in `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_spec.cli.options import SamplingOptions
from fixtures.echo_model import open_echo
from fixtures.server_requests import CHAT, ask, client_of, events

OPENING, THOUGHT, ENDING = "<think>\n", "so it is", "\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module", params=["{{ '<think>\\n' }}", "{{ '</think>'[:0] }}"])
def thinker(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A model that answers with the last message; its template opens a thought, or it does."""
    with (
        open_echo(opening=request.param) as engine,
        client_of(engine) as client,
    ):
        yield client


def answer(client: httpx.Client, text: str, **body: Any) -> dict[str, Any]:
    """The choice, which is the same streamed, with its usage."""
    message = {"role": "user", "content": f"{OPENING}{THOUGHT}{ENDING}{text}"}
    asked = {"messages": [message], "max_tokens": 300, **body}
    document = ask(client, CHAT, **asked)
    whole = document["choices"][0]
    streamed = [event["choices"][0] for event in events(client, CHAT, **asked)]
    told: dict[str, Any] = {"role": "assistant"}
    for choice in streamed:
        for name in ("reasoning_content", "content"):
            if name in choice["delta"]:
                told[name] = told.get(name, "") + choice["delta"][name]
    content = {**whole["message"], "content": whole["message"]["content"] or ""}
    assert told == {name: text for name, text in content.items() if name != "tool_calls"}
    assert streamed[-1]["finish_reason"] == whole["finish_reason"]
    return {**whole, "usage": document["usage"]}


@pytest.mark.parametrize(
    ("body", "thought", "text"),
    [
        ({}, THOUGHT, "yes"),
        ({"stop": "it"}, THOUGHT, "yes"),
        ({"stop": "s"}, THOUGHT, "ye"),
        ({"reasoning_budget": 50}, THOUGHT, "yes"),
        ({"reasoning_effort": "high"}, THOUGHT, "yes"),
        ({"include_reasoning": False}, None, "yes"),
        ({"reasoning": {"exclude": True}}, None, "yes"),
        ({"reasoning_format": "hidden"}, None, "yes"),
        ({"regex": "yes|no"}, THOUGHT, "yes"),
        ({"reasoning_effort": "low", "regex": "yes|no"}, THOUGHT, "yes"),
    ],
    ids=str,
)
def test_a_thought_stands_beside_the_text(
    thinker: httpx.Client, body: Any, thought: str | None, text: str
) -> None:
    choice = answer(thinker, "yes", **body)
    assert choice["message"].get("reasoning_content") == thought
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    counted = choice["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(THOUGHT) < counted < choice["usage"]["completion_tokens"]


def test_a_schema_and_a_call_come_after_the_thought(thinker: httpx.Client) -> None:
    choice = answer(thinker, '{"a": 1}', response_format=JSON)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (
        THOUGHT,
        '{"a": 1}',
    )
    choice = answer(thinker, CALL, tools=[TOOL], tool_choice="required")
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"


def test_an_answer_that_ends_within_a_thought_is_cut(thinker: httpx.Client) -> None:
    choice = answer(thinker, "yes", max_tokens=15)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"].startswith("so it ")


@pytest.mark.parametrize(
    ("options", "body", "reason"),
    [
        ({}, {}, "stop"),
        ({"max_tokens": 5}, {}, "length"),
        ({}, {"max_tokens": 5}, "length"),
        ({"max_tokens": 5}, {"reasoning_budget": 7}, "length"),
        ({}, {"reasoning_budget": 7}, "stop"),
    ],
    ids=str,
)
def test_a_thought_has_room_beside_the_text_where_nobody_says_how_long_an_answer_may_be(
    options: dict[str, Any], body: dict[str, Any], reason: str
) -> None:
    with (
        open_echo(opening="{{ '<think>\\n' }}") as engine,
        client_of(engine, sampling=SamplingOptions(**options)) as client,
    ):
        message = {"role": "user", "content": f"{OPENING}{THOUGHT}{ENDING}yes"}
        choice = ask(client, CHAT, messages=[message], **body)["choices"][0]
    assert choice["finish_reason"] == reason
    assert (choice["message"]["content"] == "yes") == (reason == "stop")
