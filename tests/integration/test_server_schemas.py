"""Schemas of requests: refused with their place, or held."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from fixtures.server_requests import CHAT, HELLO, ask

PAIR = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "type is one of .* at #/type",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"not": {"pattern": "a"}}}},
            "response_format",
            "cannot be held to not at #/not",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": PAIR | {"not": {}}},
                    }
                ]
            },
            "tools",
            "no object fits at the parameters of f",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"type": "dict"}},
                    }
                ]
            },
            "tools",
            "type is one of .* at the parameters of f/type",
        ),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_with_its_place(
    client: httpx.Client, asked: Any, param: str, told: str
) -> None:
    response = client.post(CHAT, json={"messages": HELLO, **asked})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert re.search(told, error["message"]), error["message"]


def test_arguments_of_a_required_call_are_an_object_whatever_its_schema(
    client: httpx.Client,
) -> None:
    """The schema has no type, and the tokens that begin an object are as unlikely as can be."""
    parameters = {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    body = {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": 80,
        "temperature": 0,
        "logit_bias": {str(ord("{")): -100, str(ord('"')): 100},
    }
    (choice,) = ask(client, CHAT, **body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert choice["finish_reason"] == "tool_calls"
