"""What the items of the Responses API are as messages."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.apps.server.reply import sealed
from edge_spec.apps.server.responses import ResponsesBody

HI = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OTHER = CALL | {"call_id": "c2", "id": "fc_2", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "phase": "final_answer",
    "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "so"}],
}


def messages_of(**body: Any) -> list[Any]:
    """The messages that the model is asked with."""
    return list(ResponsesBody.model_validate(body).request().messages)


def called(*ids: str, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": '{"a": 1}'}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


ANSWER = {"role": "assistant", "content": "yes"}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "7"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [HI]),
        ([HI], [HI]),
        ([HI | {"role": "developer"}], [HI | {"role": "developer"}]),
        ([HI | {"content": [{"type": "input_text", "text": "h"}] * 2}], [HI | {"content": "hh"}]),
        ([HI, SAID, HI], [HI, ANSWER, HI]),
        ([SAID, SAID], [ANSWER, ANSWER]),
        (
            [SAID | {"content": [{"type": "refusal", "refusal": "no"}]}],
            [ANSWER | {"content": "no"}],
        ),
        ([CALL, RESULT], [called("c1"), TOOL]),
        ([CALL, OTHER, RESULT], [called("c1", "c2"), TOOL]),
        ([CALL | {"namespace": "s"}], [called("c1", name="s__f")]),
        ([CALL, RESULT, OTHER], [called("c1"), TOOL, called("c2")]),
        ([SAID, CALL, RESULT], [called("c1") | {"content": "yes"}, TOOL]),
        ([CALL, SAID, OTHER], [called("c1", "c2") | {"content": "yes"}]),
        ([THOUGHT, SAID], [ANSWER | {"reasoning_content": "so"}]),
        ([THOUGHT, CALL, RESULT], [called("c1") | {"reasoning_content": "so"}, TOOL]),
        ([THOUGHT, CALL, THOUGHT, OTHER], [called("c1", "c2") | {"reasoning_content": "so\n\nso"}]),
        ([SAID, THOUGHT, SAID], [ANSWER, ANSWER | {"reasoning_content": "so"}]),
        (
            [RESULT | {"output": [{"type": "input_text", "text": "7"}], "status": "completed"}],
            [TOOL],
        ),
    ],
)
def test_items_become_messages_of_which_each_answer_is_one(items: Any, messages: Any) -> None:
    assert messages_of(input=items) == messages


@pytest.mark.parametrize(
    ("kept", "thought"),
    [
        ({"summary": [], "encrypted_content": sealed("sö")}, "sö"),
        ({"summary": [], "encrypted_content": "gAAAAA-of-another-server"}, None),
        ({"summary": [], "encrypted_content": "edge-spec.????"}, None),
        ({"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gA"}, "s"),
        ({"summary": []}, None),
    ],
)
def test_a_thought_is_read_from_what_the_client_has_kept(kept: Any, thought: str | None) -> None:
    item = {"type": "reasoning", "id": "rs_1", **kept}
    assert messages_of(input=[item, SAID])[0].get("reasoning_content") == thought


def test_instructions_go_first() -> None:
    system = {"role": "system", "content": "be brief"}
    assert messages_of(input="hi", instructions="be brief") == [system, HI]
