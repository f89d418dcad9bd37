"""Small conversations that tell what a chat template makes of larger ones."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any

from edge_spec.text.plain_messages import Message, Tools

# Words that no template has of its own.
USER, ASSISTANT = "probe-user", "probe-assistant"
LISTED, CALLED = "probe_listed", "probe_called"
RESULT, ARGUMENTS = "probe-result", {"probe_argument": "probe-value"}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": LISTED,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {"probe_argument": {"type": "string", "description": "A probe."}},
                "required": ["probe_argument"],
            },
        },
    }
]


def shape_of(message: Message) -> Hashable:
    """Returns the speaker, and whether the arguments of each call are a text, and something is
    said."""
    calls = message.get("tool_calls") or ()
    are_texts = [isinstance(_given_arguments(call), str) for call in calls]
    return message["role"], *are_texts, bool(calls and not message.get("content"))


def _given_arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments")


def probe_of(message: Message, place: int) -> Message:
    """The message with words in it that no template has of its own."""
    calls = message.get("tool_calls")
    is_silent = calls and not message.get("content")
    probe = {**message} if is_silent else {**message, "content": f"probe-content-{place}."}
    if calls:
        probe["tool_calls"] = [
            {**call, "function": _function(f"probe_call_{place}_{index}_", _given_arguments(call))}
            for index, call in enumerate(calls)
        ]
    return probe


def _function(name: str, arguments: Any) -> Mapping[str, Any]:
    is_text = isinstance(arguments, str)
    return {"name": name, "arguments": json.dumps(ARGUMENTS) if is_text else ARGUMENTS}


def words_of(message: Message) -> list[str]:
    """Returns what has to be shown of a probe. Many templates leave out what is said beside
    calls."""
    calls = message.get("tool_calls")
    return [call["function"]["name"] for call in calls] if calls else [message["content"]]


def probe_message(role: str, content: str) -> Message:
    named = {"name": CALLED, "tool_call_id": "probe0001"} if role == "tool" else {}
    return {"role": role, "content": content, **named}


def probe_call(silence: str | None, is_text: bool, times: int = 1) -> Message:
    function = _function(CALLED, "" if is_text else {})
    calls = [
        {"id": f"probe000{index + 1}", "type": "function", "function": function}
        for index in range(times)
    ]
    return {"role": "assistant", "content": silence, "tool_calls": calls}
