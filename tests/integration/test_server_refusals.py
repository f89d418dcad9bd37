"""A member of a request that would change the answer and is not honoured is refused, in one line
that names it where it stands and says what to send instead."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fixtures.server_requests import BOTH, CHAT, COMPLETIONS, HELLO, post, refusal


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_token": 5}, "max_token is no field that is known here: is max_tokens meant?"),
        ({"temprature": 1}, "temprature is no field that is known here: is temperature meant?"),
        ({"usr": "me"}, "usr is no field that is known here: is user meant?"),
        ({"flux": 1}, "flux is no field that is known here: leave it out."),
        ({"typical_p": 0.2}, "typical_p is not supported: leave it out."),
        ({"mirostat_mode": 2}, "mirostat_mode is not supported: leave it out."),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported: send repetition_penalty."),
        ({"min_tokens": 5}, "min_tokens is not supported: leave it out."),
        ({"extra_body": {"top_k": 1}}, "extra_body is not supported: send its members beside"),
        ({"format": "json"}, "format is not supported: send response_format."),
        ({"use_beam_search": True}, "use_beam_search is not supported: leave it out."),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n is 64, but penalties are"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict is not what max_tokens says: send one"),
        ({"max_tokens": 0}, "max_tokens: 0 should be from 1 to 2147483647, or -1 for no limit."),
        ({"max_tokens": "5"}, 'max_tokens: "5" should be a valid integer.'),
        ({"repeat_penalty": "x"}, 'repeat_penalty: "x" should be a valid number.'),
        ({"stop": ["a", 1]}, "stop[1]: 1 should be a valid string."),
        ({"stop": {"a": 1}}, 'stop: {"a": 1} is not what it takes; send a text, or a list of'),
        ({"stop": ["a"] * 300}, "stop: List should have at most 256 items, not 300."),
        ({"logit_bias": [[1, 2]]}, "logit_bias: [[1, 2]] should be an object."),
        ({"logit_bias": {"a": 2}}, 'logit_bias.a: "a" should match ^[0-9]{1,10}$.'),
        ({"stream_options": {"include_use": 1}}, "stream_options.include_use is no field"),
        ({"grammar": 'root ::= "a'}, "no answer can have this form (gbnf): Unexpected end"),
        ({"json_schema": "{"}, "json_schema: this is no JSON Schema; send an object."),
        ({"guided_choice": []}, "guided_choice: List should have at least 1 item, not 0."),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar is a form beside that of regex"),
        ({"response_format": "json"}, 'response_format: "json" is not what it takes; send {'),
        ({"response_format": {"type": "xml"}}, 'response_format: {"type": "xml"} is not what'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            'response_format.json_schema.schema is missing; send {"type": "json_schema"',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            'response_format.json_schema.schema is missing; send {"type": "json_schema"',
        ),
        (
            {"response_format": {"type": "json_object", "shema": {}}},
            "response_format.shema is no field that is known here: is schema meant?",
        ),
        (
            {"response_format": {"type": "json_object", "schema": 5}},
            "response_format.schema: 5 should be an object.",
        ),
    ],
    ids=json.dumps,
)
@BOTH
def test_what_is_not_honoured_is_named(
    client: httpx.Client, path: str, body: dict[str, Any], told: str
) -> None:
    assert refusal(post(client, path, **body)).startswith(told)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (COMPLETIONS, {"prompt": []}, "prompt: [] is not what it takes; send a text, token ids"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 'prompt[1]: "a" should be a valid integer.'),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1]: 1 should be a valid string."),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]: List should have at least 1 item"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]: -1 should be greater than or equal to 0."),
        (COMPLETIONS, {"prompt": ["a"] * 17}, "prompt: List should have at most 16 items"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo goes without logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs: 21 should be less than or equal to 20."),
        (COMPLETIONS, {"best_of": 3}, "best_of is not supported, but where it is n"),
        (
            COMPLETIONS,
            {"messages": HELLO},
            "messages is not supported: it belongs to POST",
        ),
        (COMPLETIONS, {"tools": [{}]}, "tools is not supported: it belongs to POST /v1/chat"),
        (CHAT, {"prompt": "a"}, "prompt is not supported: it belongs to POST /v1/completions"),
        (CHAT, {"functions": [{}]}, "functions is not supported: send tools."),
        (
            CHAT,
            {"function_call": {"name": "f"}},
            "function_call is not supported: send tool_choice, or tool_calls in a message.",
        ),
        (
            CHAT,
            {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
            "chat_template_kwargs has another enable_thinking than the request: send one of them.",
        ),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has tools: send"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template is not supported: the model's own"),
        (CHAT, {"reasoning_budget": -2}, "reasoning_budget: -2 should be greater than or equal"),
        (CHAT, {"thinking_budget": "5"}, 'thinking_budget: "5" should be a valid integer.'),
        (CHAT, {"logprobs": 5}, "logprobs: 5 should be a valid boolean."),
        (CHAT, {"think": "high"}, 'think: "high" should be a valid boolean.'),
        (CHAT, {"thinking": {"type": "maybe"}}, 'thinking: {"type": "maybe"} should be a valid'),
        (COMPLETIONS, {"think": True}, "think is not supported: leave it out."),
        (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs: true."),
        (CHAT, {"tool_choice": 5}, "tool_choice: 5 is not what it takes; send none, auto"),
        (CHAT, {"tool_choice": "f"}, "tool_choice: \"f\" should be 'none', 'auto', 'required'"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function is missing."),
        (CHAT, {"tool_choice": {"function": {}}}, "tool_choice.function.name is missing."),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type is web_search: tools here are"),
        (CHAT, {"tools": [{"type": "function", "name": "a b"}]}, 'tools[0].name: "a b" should'),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools[0].function.paramters is no field that is known here: is parameters meant?",
        ),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message goes on with a message, add_generation_prompt begins one",
        ),
    ],
    ids=json.dumps,
)
def test_what_is_not_honoured_of_one_endpoint_is_named(
    client: httpx.Client, path: str, body: dict[str, Any], told: str
) -> None:
    assert refusal(post(client, path, **body)).startswith(told)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (5, "messages[1]: 5 should be an object."),
        ({}, "messages[1].role is missing."),
        ({"role": "wizard"}, 'messages[1].role: "wizard" should be'),
        ({"role": "user"}, "messages[1].content is missing: a message of the role user needs"),
        ({"role": "system", "content": None}, "messages[1].content is missing: a message of the"),
        ({"role": "user", "content": 5}, "messages[1].content: 5 is not what it takes; send a"),
        ({"role": "user", "content": {"text": "a"}}, 'messages[1].content: {"text": "a"} is not'),
        ({"role": "user", "content": ["a"]}, 'messages[1].content[0]: "a" is not what it takes'),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[1].content[0].text is missing.",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            "messages[1].content[1]: the model reads text: send parts of type text, not input_",
        ),
        ({"role": "user", "contnet": "a"}, "messages[1].contnet is no field that is known here"),
        ({"role": "user", "content": "a", "images": ["x"]}, "messages[1].images is not supported"),
        ({"role": "assistant", "thinking": 5}, "messages[1].thinking: 5 should be a valid string."),
        ({"role": "assistant", "partial": "so"}, 'messages[1].partial: "so" should be a valid'),
        (
            {"role": "assistant", "function_call": {"name": "f"}},
            "messages[1].function_call is not supported: send tool_choice, or tool_calls",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[1].tool_calls[0].function.name is missing.",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages[1].tool_calls[0].function.arguments: 5 is not what it takes; send JSON in",
        ),
    ],
    ids=json.dumps,
)
def test_a_fault_of_a_message_is_named_where_it_stands(
    client: httpx.Client, message: Any, told: str
) -> None:
    assert refusal(post(client, CHAT, messages=[*HELLO, message])).startswith(told)
