"""Requests of Anthropic's API say the same as those of OpenAI's that they become."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.apps.server.anthropic import CountBody
from edge_spec.apps.server.reply import sealed

HELLO = {"role": "user", "content": "hello"}
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


def messages_of(**body: Any) -> list[Any]:
    """The messages that the model is asked with."""
    return list(CountBody.model_validate({"messages": [HELLO], **body}).request().messages)


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
            [HELLO, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, HELLO],
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
    assert messages_of(messages=messages) == expected


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
    (told,) = messages_of(messages=messages)
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
    assert messages_of(system=system) == ([first, HELLO] if expected else [HELLO])
