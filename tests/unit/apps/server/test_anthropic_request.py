"""Requests of Anthropic's API say the same as those of OpenAI's that they become."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from edge_spec.apps.server.anthropic.parse import CountRequest, MessagesRequest
from edge_spec.apps.server.fields import refused_body
from edge_spec.apps.server.reply import sealed

HELLO = {"role": "user", "content": "hello"}
PATHS = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read", "description": "Reads a file.", "input_schema": PATHS}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
CALLED = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "read", "arguments": {"path": "a"}},
}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def thought(said: str, signature: str = "s") -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": signature}


def asked(**body: Any) -> dict[str, Any]:
    """What the conversation's request says that this one becomes."""
    request = CountRequest.model_validate({"messages": [HELLO], **body}).for_chat()
    told = request.model_dump(exclude_none=True, warnings=False)
    return {name: value for name, value in told.items() if name in request.model_fields_set}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        (
            [{"role": "user", "content": [text("a", **EPHEMERAL), text("b", citations=[])]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            [{"role": "system", "content": [text("a")]}, HELLO],
            [{"role": "system", "content": "a"}, HELLO],
        ),
        (
            [
                HELLO,
                {"role": "assistant", "content": [thought("hm"), text("a"), text("b"), CALL]},
                {"role": "user", "content": [text("and"), result("read"), text("so")]},
            ],
            [
                HELLO,
                {
                    "role": "assistant",
                    "content": "ab",
                    "reasoning_content": "hm",
                    "tool_calls": [CALLED],
                },
                {"role": "tool", "tool_call_id": "toolu_1", "name": "read", "content": "read"},
                {"role": "user", "content": "and\nso"},
            ],
        ),
        (
            [HELLO, {"role": "assistant", "content": [CALL]}, HELLO],
            [HELLO, {"role": "assistant", "tool_calls": [CALLED]}, HELLO],
        ),
        (
            [
                HELLO,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "eA=="},
                        thought("", sealed("hidden")),
                        thought("", "edge-spec.???"),
                        thought("told"),
                        text("a"),
                    ],
                },
                HELLO,
            ],
            [
                HELLO,
                {"role": "assistant", "content": "a", "reasoning_content": "hidden\n\ntold"},
                HELLO,
            ],
        ),
        ([HELLO, {"role": "assistant", "content": []}], [HELLO]),
    ],
)
def test_messages_become_those_of_a_conversation(messages: Any, expected: Any) -> None:
    assert asked(messages=messages)["messages"] == expected


@pytest.mark.parametrize(
    ("content", "more", "expected"),
    [
        ("done", {}, "done"),
        (None, {}, ""),
        ([], {}, ""),
        ([text("a"), text("b", **EPHEMERAL)], {"is_error": False}, "a\nb"),
        ([{"type": "tool_reference", "tool_name": "read"}], {}, "read"),
        ("no such file", {"is_error": True}, "Error: no such file"),
    ],
)
def test_what_a_tool_gave_is_a_message_of_its_own(content: Any, more: Any, expected: str) -> None:
    messages = [{"role": "user", "content": [result(content, **more)]}]
    (told,) = asked(messages=messages)["messages"]
    assert told == {"role": "tool", "tool_call_id": "toolu_1", "content": expected}


BILLED = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=0aaa9;"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, None),
        ("", None),
        ("Be brief.", "Be brief."),
        (
            [text("You are an agent.", **EPHEMERAL), text("Be brief.")],
            "You are an agent.\nBe brief.",
        ),
        ([text(BILLED), text("You are an agent.")], "You are an agent."),
        (f"{BILLED}You are an agent.", "You are an agent."),
        (f"{BILLED}\nYou are an agent.", "You are an agent."),
        (
            "Never send x-anthropic-billing-header: a=b;",
            "Never send x-anthropic-billing-header: a=b;",
        ),
    ],
)
def test_the_systems_text_has_nothing_that_is_for_servers(system: Any, expected: Any) -> None:
    """What changes with each request would have all that comes after it read again."""
    first = {"role": "system", "content": expected}
    assert asked(system=system)["messages"] == ([first, HELLO] if expected else [HELLO])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tools": [{**READ, "type": "custom", **EPHEMERAL, "input_examples": [{}]}]}, {}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "any", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": False}},
            {
                "tool_choice": {"type": "function", "function": {"name": "read"}},
                "parallel_tool_calls": True,
            },
        ),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        (
            {"temperature": 1, "top_p": 0.9, "top_k": 40},
            {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
        ),
        ({"seed": 3, "session_id": "a"}, {"seed": 3, "session_id": "a"}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 99, "display": "omitted"}},
            {"enable_thinking": True, "reasoning_budget": 99},
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"enable_thinking": True, "reasoning_effort": "high"},
        ),
        ({"metadata": {"user_id": "a"}, "service_tier": "auto", **EPHEMERAL}, {}),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, {}),
    ],
)
def test_fields_become_those_of_a_conversation(body: Any, expected: Any) -> None:
    told = asked(tools=[READ], **body) if "tools" not in body else asked(**body)
    function = {"name": "read", "description": "Reads a file.", "parameters": PATHS}
    assert told.pop("tools") == [{"type": "function", "function": function}]
    assert told.pop("messages") == [HELLO]
    assert told == {"enable_thinking": False, **expected}


def test_a_form_of_the_answer_is_held() -> None:
    format = {"type": "json_schema", "schema": PATHS}
    of_openai = {"type": "json_schema", "json_schema": {"schema": PATHS}}
    for body in (
        {"output_config": {"format": format}},
        {"output_format": format},
        {"response_format": of_openai},
    ):
        request = CountRequest.model_validate({"messages": [HELLO], **body}).for_chat()
        assert request.form is not None and request.form.field == "response_format"


def test_an_answer_goes_on_with_the_text_of_the_last_message() -> None:
    assert "continue_final_message" not in asked()
    for content in ("So", [text("S"), text("o")]):
        told = asked(messages=[HELLO, {"role": "assistant", "content": content}])
        assert told["continue_final_message"] is True
        assert told["messages"][-1]["content"] == "So"


BLOCK = {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: 0 should be greater than or equal to 1."),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: "),
        (
            BLOCK,
            "messages[0].content[0]: the model reads text: send blocks of type text, thinking, "
            "tool_use or tool_result, not image.",
        ),
        (
            {"messages": [{"role": "user", "content": [result([{"type": "document"}])]}]},
            "messages[0].content[0].content[0]: the model reads text: send blocks of type text, "
            "not document.",
        ),
        (
            {"messages": [{"role": "user", "content": [CALL]}]},
            "messages[0].content has tool_use, which no message of the role user has.",
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [CALL]}]},
            "messages ends with tool_use: an answer goes on with a text, or comes after a message "
            "of the user.",
        ),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages says nothing: "),
        ({"system": [{"type": "image"}]}, "system[0]: the model reads text: "),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type is web_search_20250305, which Anthropic's servers or models know: send "
            "a tool with a name, a description and an input_schema.",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing."),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name names a tool with the type tool"),
        ({"tool_choice": "auto"}, 'tool_choice: "auto" should be an object.'),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: 0 "),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: "),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers is not supported: send their tools"),
        ({"n": 2}, "n asks for what has no place in a message: leave it out."),
        ({"n_probs": 1}, "n_probs asks for what has no place in a message: leave it out."),
        ({"speculative": {"tokens": True}}, "speculative asks for what has no place in a message"),
        ({"max_token": 2}, "max_token is no field that is known here: is max_tokens meant?"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(body: Any, told: str) -> None:
    given = {"messages": [HELLO], "max_tokens": 8, **body}
    with pytest.raises(ValidationError) as refused:
        MessagesRequest.model_validate(given)
    error = refused.value.errors()[0]
    message = refused_body({**error, "loc": ("body", *error["loc"])}, given).message
    assert message.startswith(told) if not told.endswith(".") else message == told
