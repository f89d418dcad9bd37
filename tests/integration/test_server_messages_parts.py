"""Thoughts, calls of tools and ends of an answer in Anthropic's Messages API. The model answers
with the text of the last message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edge_spec.apps.server import RunningServer, ServerOptions
from fixtures.echo_model import CLOSED, OPENED, SWITCHED, open_echo

anthropic: Any = pytest.importorskip("anthropic")

THINKS = {"type": "adaptive"}
FILES = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": name, "description": f"Can {name} a file.", "input_schema": FILES}
    for name in ("read", "edit", "mcp__files__search")
]


@pytest.fixture(scope="module")
def user() -> Iterator[Any]:
    with (
        open_echo(opening=SWITCHED) as engine,
        RunningServer(engine, ServerOptions(port=0, parallel=1)) as running,
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as opened,
    ):
        yield opened


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def answer(user: Any, messages: Any, **asked: Any) -> Any:
    """The same whether it is streamed or not."""
    asked = {"model": "echo", "max_tokens": 400, "messages": messages, **asked}
    message = user.messages.create(**asked)
    with user.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [
        {**block.to_dict(), **({"id": new.id} if block.type == "tool_use" else {})}
        for block, new in zip(message.content, streamed.content, strict=True)
    ]
    ends = [(each.stop_reason, each.stop_sequence) for each in (message, streamed)]
    assert ends[0] == ends[1]
    return message


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("thinking", [THINKS, {"type": "enabled", "budget_tokens": 1024}])
def test_a_thought_is_a_block(user: Any, thinking: Any) -> None:
    message = answer(user, said(f"{OPENED}I read.\n</think>\n\nDone."), thinking=thinking)
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "I read.", "Done.")
    assert thought.signature
    assert message.usage.output_tokens_details.thinking_tokens == len("I read.\n</think>\n\n")


def test_a_thought_that_is_not_told_comes_back_with_its_signature(user: Any) -> None:
    thinking = {**THINKS, "display": "omitted"}
    asked = said(f"{OPENED}I read.\n</think>\n\nDone.")
    hidden = answer(user, asked, thinking=thinking)
    told = answer(user, asked, thinking=THINKS)
    assert hidden.content[0].thinking == ""
    counts = [
        user.messages.count_tokens(
            model="echo",
            messages=[*asked, {"role": "assistant", "content": each.content}, *said("a")],
        ).input_tokens
        for each in (hidden, told)
    ]
    assert counts[0] == counts[1]


def test_text_and_calls_are_blocks_in_their_order(user: Any) -> None:
    calls = "\n".join([call("read", path="a"), call("edit", path="b", line=3)])
    several = {"type": "auto", "disable_parallel_tool_use": False}
    asked = said(f"{CLOSED}Let me see.\n{calls}")
    message = answer(user, asked, tools=TOOLS, tool_choice=several)
    text, first, second = message.content
    assert text.text.strip() == "Let me see."
    assert (first.name, first.input) == ("read", {"path": "a"})
    assert (second.name, second.input) == ("edit", {"path": "b", "line": 3})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"


def test_a_call_that_is_cut_is_not_one_to_make(user: Any) -> None:
    written = CLOSED + call("edit", path="a.py", line=3)
    message = answer(user, said(written), tools=TOOLS, max_tokens=len(written) - len(CLOSED) - 20)
    (cut,) = message.content
    assert (cut.name, cut.input, message.stop_reason) == ("edit", {"path": "a.py"}, "max_tokens")


def test_an_agent_calls_twenty_tools_and_each_turn_is_read_once(user: Any) -> None:
    """The system's text begins with a line that changes with each request, as Claude Code's
    does."""
    marked = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = []
    given: list[Any] = [{"type": "text", "text": "go", **marked}]
    for turn in range(20):
        name, path = TOOLS[turn % 3]["name"], f"file{turn}.py"
        billed = f"x-anthropic-billing-header: cc_version=2.1.177; cch={turn:05x};"
        wanted = {"type": "text", "text": f"{CLOSED}Turn {turn}.\n{call(name, path=path)}"}
        messages.append({"role": "user", "content": [*given, wanted]})
        with user.messages.stream(
            model="echo",
            max_tokens=400,
            system=[
                {"type": "text", "text": billed},
                {"type": "text", "text": "Be an agent.", **marked},
            ],
            tools=[*TOOLS[:-1], {**TOOLS[-1], **marked}],
            metadata={"user_id": "someone"},
            messages=messages,
        ) as stream:
            message = stream.get_final_message()
        called = message.content[-1]
        assert (called.name, called.input) == (name, {"path": path})
        assert message.stop_reason == "tool_use"
        messages.append({"role": "assistant", "content": message.content})
        given = [{"type": "tool_result", "tool_use_id": called.id, "content": f"{turn} lines"}]
        if turn % 5 == 4:
            given = [{**given[0], "is_error": True}]
        if turn:
            assert message.usage.cache_read_input_tokens > message.usage.input_tokens
