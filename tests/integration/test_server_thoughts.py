"""Thoughts of a model beside its text, in `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_spec.apps.server import ServerOptions
from edge_spec.apps.server.schema import ChatRequest
from edge_spec.apps.server.work import Desk
from edge_spec.errors import UsageError
from fixtures.echo_model import THINKING_TEMPLATE, open_echo
from fixtures.server_requests import CHAT, HELLO, ask, client_of, events

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


@pytest.mark.parametrize("body", [{"reasoning_format": "none"}, {"separate_reasoning": False}])
def test_a_thought_stays_in_the_text_where_that_is_asked_for(
    thinker: httpx.Client, body: Any
) -> None:
    message = answer(thinker, "yes", **body)["message"]
    assert "reasoning_content" not in message
    assert message["content"].removeprefix(OPENING) == f"{THOUGHT}{ENDING}yes"


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


def test_a_thought_ends_after_its_budget(thinker: httpx.Client) -> None:
    choice = answer(thinker, "yes", thinking_budget=3, regex="yes|no")
    assert THOUGHT.startswith(choice["message"]["reasoning_content"])
    assert choice["message"]["content"] in ("yes", "no")


def test_an_answer_that_ends_within_a_thought_is_cut(thinker: httpx.Client) -> None:
    choice = answer(thinker, "yes", max_tokens=15)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"].startswith("so it ")


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"thinking": False}},
        {"reasoning_budget": 0},
        {"thinking": {"type": "disabled"}},
    ],
    ids=str,
)
def test_thoughts_are_off(thinker: httpx.Client, body: Any) -> None:
    choice = answer(thinker, "yes", **body)
    assert "reasoning_content" not in choice["message"]


SWITCHED = "{% if thinking %}{{ '<think>\\n' }}{% else %}</think>{% endif %}"


@pytest.mark.parametrize(
    ("body", "is_on"),
    [
        ({}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning_effort": "minimal"}, False),
        ({"enable_thinking": True}, True),
        ({"thinking_budget": 9}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
    ],
    ids=str,
)
def test_who_asks_for_thoughts_turns_them_on(body: Any, is_on: bool) -> None:
    """The model's template opens one only where it is asked for."""
    with open_echo(opening=SWITCHED) as engine:
        request = ChatRequest.model_validate({"messages": HELLO, **body})
        work = Desk("echo", engine, ServerOptions()).chat(request)
        prompt = engine.parts.text.tokenizer.decode(work.prompts[0])
    assert prompt.endswith("a:<think>\n" if is_on else "a:</think>")


@pytest.mark.parametrize("begun", ["<think>\nso", "<think>\nso</think>\n\nye"])
def test_an_answer_goes_on_within_its_thought_or_after_it(begun: str) -> None:
    echoed = f"{OPENING}so it is{ENDING}yes"
    goes_on = {"role": "assistant", "prefix": True, "content": begun}
    with (
        open_echo(template=THINKING_TEMPLATE) as engine,
        client_of(engine) as client,
    ):
        messages = [{"role": "user", "content": echoed}, goes_on]
        choice = ask(client, CHAT, messages=messages, max_tokens=300)["choices"][0]
    is_within = "</think>" not in begun
    assert choice["message"].get("reasoning_content") == (" it is" if is_within else None)
    assert choice["message"]["content"].endswith("yes" if is_within else "s")


def test_thoughts_are_among_the_scored_tokens(thinker: httpx.Client) -> None:
    choice = answer(thinker, "yes", logprobs=True)
    scored = choice["logprobs"]["content"]
    assert len(scored) == choice["usage"]["completion_tokens"] - 1  # but for the end
    written = bytes(byte for token in scored for byte in token["bytes"] or ()).decode()
    assert f"{THOUGHT}{ENDING}yes" in written


@pytest.mark.parametrize(
    ("body", "thought"),
    [
        ({}, "so"),
        ({"reasoning_budget": -1}, THOUGHT),
        ({"enable_thinking": True}, THOUGHT),
        ({"reasoning_effort": "high"}, THOUGHT),
        ({"reasoning_budget": 3}, "so "),
        ({"reasoning_effort": "none"}, None),
    ],
    ids=str,
)
def test_the_servers_own_budget_is_of_requests_that_do_not_say(
    body: dict[str, Any], thought: str | None
) -> None:
    with (
        open_echo(opening="{{ '<think>\\n' }}") as engine,
        client_of(engine, reasoning=2) as client,
    ):
        message = answer(client, "yes", **body)["message"]
    assert (message.get("reasoning_content") or "").rstrip() == (thought or "").rstrip()


@pytest.mark.parametrize("value", ["maybe", -1, 1.5, True])
def test_a_server_with_a_budget_that_is_none_does_not_start(value: Any) -> None:
    with pytest.raises(UsageError, match="reasoning is"):
        ServerOptions(reasoning=value)


@pytest.mark.parametrize(
    ("options", "body", "reason"),
    [
        ({"max_tokens": 5, "thought_tokens": 300}, {}, "stop"),
        ({"max_tokens": 5, "thought_tokens": 0}, {}, "length"),
        ({"max_tokens": 5, "thought_tokens": 300}, {"max_tokens": 5}, "length"),
        ({"max_tokens": 5}, {"reasoning_budget": 7}, "length"),  # and 13 of its end
        ({"max_tokens": 19}, {"reasoning_budget": 7}, "stop"),
        ({"max_tokens": None}, {}, "stop"),
    ],
    ids=str,
)
def test_a_thought_has_room_beside_the_text_where_nobody_says_how_long_an_answer_may_be(
    options: dict[str, Any], body: dict[str, Any], reason: str
) -> None:
    with (
        open_echo(opening="{{ '<think>\\n' }}") as engine,
        client_of(engine, **options) as client,
    ):
        message = {"role": "user", "content": f"{OPENING}{THOUGHT}{ENDING}yes"}
        choice = ask(client, CHAT, messages=[message], **body)["choices"][0]
    assert choice["finish_reason"] == reason
    assert (choice["message"]["content"] == "yes") == (reason == "stop")
