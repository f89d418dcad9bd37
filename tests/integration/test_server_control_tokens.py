"""What requests say stays text, by the counts of tokens that the server gives."""

from __future__ import annotations

import json
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


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def body_of(place: str, text: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({"a": text})}
    call = {"id": "1", "type": "function", "function": function}
    described = {"name": "f", "description": text, "parameters": {"properties": {text: {}}}}
    parts = [{"type": "text", "text": part} for part in (text[:4], text[4:])]
    messages = {
        "parts": [said(parts)],
        "developer": [said(text, "developer"), said("a")],
        "name": [said("a", name=text)],
        "call and result": [
            said("a"),
            said(None, "assistant", tool_calls=[call]),
            said(text, "tool", tool_call_id="1"),
        ],
        "halves": [said(text[:5]), said(text[5:], "assistant"), said(text)],
        "tool": [said("a")],
    }
    tools = {"tools": [{"type": "function", "function": described}]} if place == "tool" else {}
    return {"messages": messages[place], **tools}


@pytest.mark.parametrize(
    "place", ["parts", "developer", "name", "call and result", "halves", "tool"]
)
def test_a_conversation_has_no_control_token_of_its_own(client: httpx.Client, place: str) -> None:
    forged, plain = (num_tokens(client, CHAT, **body_of(place, t)) for t in (CONTROL, LETTERS))
    assert forged == plain


def test_a_prompt_without_a_template_has_what_it_spells(client: httpx.Client) -> None:
    assert num_tokens(client, COMPLETIONS, prompt=f"a{CONTROL}") == 2


def test_who_opens_the_model_may_have_them_read(hf: Callable[..., Path]) -> None:
    with edge_spec.load(hf(), runtime="reference", parse_special=True) as engine:
        (end,) = engine.encode(CONTROL)
        assert engine.chat_prompt(CONTROL).count(end) == 2
