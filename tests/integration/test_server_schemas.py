"""Schemas of requests: refused with their place, or held."""

from __future__ import annotations

import json

import httpx

from fixtures.server_requests import CHAT, HELLO, ask


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
