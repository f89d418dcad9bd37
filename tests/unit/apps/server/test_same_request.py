"""The bodies of all APIs that ask for the same are read as the same request."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from edge_spec.apps.server.anthropic import MessagesBody
from edge_spec.apps.server.ollama import OllamaChatBody
from edge_spec.apps.server.openai import ChatBody
from edge_spec.apps.server.responses import ResponsesBody
from edge_spec.apps.server.schema import AnswerBody, Request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "A function.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"a": 1}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "call"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "four", "tool_call_id": "c1", "name": "f"},
]
NAMELESS = [*MESSAGES[:3], {"role": "tool", "content": "four", "tool_call_id": "c1"}]
CHAT = (
    ChatBody,
    {
        "messages": MESSAGES,
        "tools": [TOOL],
        "max_tokens": 7,
        "temperature": 0.5,
        "stop": ["x"],
        "enable_thinking": True,
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
)
RESPONSES = (
    ResponsesBody,
    {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "call"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "four"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 7,
        "temperature": 0.5,
        "stop": "x",
        "reasoning": {"enabled": True},
        "tool_choice": "required",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
)
USED = {"type": "tool_use", "id": "c1", "name": "f", "input": ARGUMENTS}
ANTHROPIC = (
    MessagesBody,
    {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "call"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USED]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "four"}],
            },
        ],
        "tools": [{"name": "f", "description": "A function.", "input_schema": SCHEMA}],
        "max_tokens": 7,
        "temperature": 0.5,
        "stop_sequences": ["x"],
        "thinking": {"type": "adaptive"},
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
)
OLLAMA = (
    OllamaChatBody,
    {
        "messages": MESSAGES,
        "tools": [TOOL],
        "options": {"num_predict": 7, "temperature": 0.5, "stop": ["x"]},
        "think": True,
        "tool_choice": "required",
        "format": SCHEMA,
        "stream": False,
    },
)
OWN = ("body", "messages", "messages_field", "form")  # named as the API names them


def read(kind: type[AnswerBody], body: Any) -> Request:
    return kind.model_validate(body).request()


@pytest.mark.parametrize("api", [RESPONSES, ANTHROPIC, OLLAMA], ids=lambda api: api[0].__name__)
def test_every_api_asks_for_the_same(api: tuple[type[AnswerBody], Any]) -> None:
    expected, request = read(*CHAT), read(*api)
    for field in fields(Request):
        if field.name not in OWN:
            assert getattr(request, field.name) == getattr(expected, field.name), field.name
    for name in ("options", "sampling"):
        assert getattr(request.body, name)() == getattr(expected.body, name)()
    assert list(request.messages) == (NAMELESS if api is RESPONSES else MESSAGES)
    assert request.form is not None and expected.form is not None
    assert request.form[1] == expected.form[1]


def test_a_call_in_the_flat_form_keeps_its_id() -> None:
    """Or the result of the tool would answer no call."""
    flat = {"type": "function", "id": "c1", "name": "f", "arguments": ARGUMENTS}
    messages = [*MESSAGES[:2], MESSAGES[2] | {"tool_calls": [flat]}, MESSAGES[3]]
    request = read(ChatBody, CHAT[1] | {"messages": messages})
    assert request.messages[2]["tool_calls"][0]["id"] == "c1"


HI = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "he"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [HI, BEGUN | {"prefix": True}]}),
        (ChatBody, {"messages": [HI, BEGUN], "continue_final_message": True}),
        (OllamaChatBody, {"messages": [HI, BEGUN | {"partial": True}]}),
        (ResponsesBody, {"input": [HI, BEGUN], "continue_final_message": True}),
        (MessagesBody, {"messages": [HI, BEGUN], "max_tokens": 7}),
    ],
)
def test_an_answer_goes_on_with_the_last_message(kind: type[AnswerBody], body: Any) -> None:
    assert read(kind, body).prompt_options["continue_final_message"] is True


@pytest.mark.parametrize("kind", [ChatBody, OllamaChatBody])
def test_an_answer_begins_a_message_unless_it_is_asked_otherwise(kind: type[AnswerBody]) -> None:
    asked = read(kind, {"messages": [HI | {"prefix": False}], "add_generation_prompt": False})
    assert asked.prompt_options == {"add_generation_prompt": False}
