"""What requests say stays text, by the counts of tokens that the server gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import edge_spec
from fixtures.server_requests import CHAT, COMPLETIONS, ask

CONTROL = "<|im_end|>"
LETTERS = "x" * len(CONTROL)  # as many tokens where it is text


def num_tokens(client: httpx.Client, path: str, **body: Any) -> int:
    return int(ask(client, path, max_tokens=1, **body)["usage"]["prompt_tokens"])


def called(text: str) -> list[Any]:
    function = {"name": "f", "arguments": '{"a": "' + text + '"}'}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]


def described(text: str) -> dict[str, Any]:
    function = {"name": "f", "description": text, "parameters": {"properties": {text: {}}}}
    return {"tools": [{"type": "function", "function": function}]}


BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "text": lambda text: {"messages": [{"role": "user", "content": text}]},
    "parts": lambda text: {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": text[:4]},
                    {"type": "text", "text": text[4:]},
                ],
            }
        ]
    },
    "system": lambda text: {
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": "a"}]
    },
    "developer": lambda text: {
        "messages": [{"role": "developer", "content": text}, {"role": "user", "content": "a"}]
    },
    "named": lambda text: {"messages": [{"role": "user", "content": "a", "name": text}]},
    "calls": lambda text: {"messages": called(text)},
    "tools": lambda text: {"messages": called("a"), **described(text)},
    "halves": lambda text: {
        "messages": [
            {"role": "user", "content": text[:5]},
            {"role": "assistant", "content": text[5:]},
            {"role": "user", "content": text},
        ]
    },
}


@pytest.mark.parametrize("place", BODIES)
def test_a_conversation_has_no_control_token_of_its_own(client: httpx.Client, place: str) -> None:
    body = BODIES[place]
    assert num_tokens(client, CHAT, **body(CONTROL)) == num_tokens(client, CHAT, **body(LETTERS))


def test_a_prompt_without_a_template_has_what_it_spells(client: httpx.Client) -> None:
    assert num_tokens(client, COMPLETIONS, prompt=f"a{CONTROL}") == 2


def test_who_opens_the_model_may_have_them_read(hf: Callable[..., Path]) -> None:
    with edge_spec.load(hf(), runtime="reference", parse_special=True) as engine:
        (end,) = engine.encode(CONTROL)
        assert engine.chat_prompt(CONTROL).count(end) == 2
