"""Parts of the Responses API that need no network: what its items are as messages, and the events
that tell of an answer's items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from edge_spec.apps.server.messages import for_template
from edge_spec.apps.server.reply import sealed
from edge_spec.apps.server.responses.parse import ResponsesRequest
from edge_spec.apps.server.responses.write import Output
from edge_spec.engine.results import Chunk
from edge_spec.text.parts.part import CallHead, PartKind

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
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


def called(*ids: str, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 1}}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


ANSWER = {"role": "assistant", "content": "yes"}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "7"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [HI]),
        ([HI], [HI]),
        ([HI | {"role": "developer"}], [HI | {"role": "system"}]),
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
    request = ResponsesRequest.model_validate({"input": items})
    assert [for_template(message) for message in request.messages] == messages


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
    request = ResponsesRequest.model_validate({"input": [item, SAID]})
    assert request.messages[0].reasoning_content == thought


def test_instructions_go_first() -> None:
    request = ResponsesRequest.model_validate({"input": "hi", "instructions": "be brief"})
    system = {"role": "system", "content": "be brief"}
    assert [for_template(message) for message in request.messages] == [system, HI]


TEXT, SO = PartKind.TEXT, PartKind.REASONING


def text(piece: str, kind: PartKind = TEXT) -> Chunk:
    return Chunk(piece, (), kind)


def call(piece: str, name: str | None = None) -> Chunk:
    head = None if name is None else CallHead(0, f"call_{name}", name)
    return Chunk(piece, (), PartKind.CALL, head)


def told(
    chunks: Sequence[Chunk], is_complete: bool = True, is_cut: bool = False, **options: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the events, each of which OpenAI's package knows, and the output."""
    options = {"tells_thoughts": True, "summarizes": False, "seals_thoughts": False} | options
    output = Output(lambda name: (None, name), **options)
    events = [event for chunk in chunks for event in output.push(chunk, [])]
    events += output.finish(is_complete=is_complete, is_cut=is_cut)
    for number, event in enumerate(events):
        read = EVENTS.validate_python({**event, "sequence_number": number})
        assert read.type == event["type"]
    return events, output.documents()


def shape(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


OF_TEXT = [
    *("output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.done", "content_part.done", "output_item.done"),
]
OF_THOUGHT = [name.replace("output_text", "reasoning_text") for name in OF_TEXT]
OF_CALL = [
    *("output_item.added", "function_call_arguments.delta"),
    *("function_call_arguments.done", "output_item.done"),
]
EMPTY = [name for name in OF_TEXT if not name.endswith("delta")]


@pytest.mark.parametrize(
    ("chunks", "shapes"),
    [
        ([text("yes")], OF_TEXT),
        ([], EMPTY),
        ([text("so", SO), text("yes")], [*OF_THOUGHT, *OF_TEXT]),
        ([text("so", SO)], [*OF_THOUGHT, *EMPTY]),
        ([text("", SO), text("yes")], OF_TEXT),
        ([call("{}", "f")], OF_CALL),
        ([call("{}", "f"), call("{}", "g")], [*OF_CALL, *OF_CALL]),
        ([text("yes"), call("{}", "f"), text("no")], [*OF_TEXT, *OF_CALL, *OF_TEXT]),
        ([text("so", SO), call("", "f"), call("{}")], [*OF_THOUGHT, *OF_CALL]),
    ],
)
def test_events_come_in_the_order_of_openai(chunks: list[Chunk], shapes: list[str]) -> None:
    events, _ = told(chunks)
    assert shape(events) == shapes


@pytest.mark.parametrize("summarizes", [False, True])
def test_the_items_that_are_told_whole_are_those_of_the_stream(summarizes: bool) -> None:
    chunks = [text("s", SO), text("o", SO), text("ye"), text("s"), call('{"a"', "f"), call(": 1}")]
    events, output = told(chunks, summarizes=summarizes, seals_thoughts=True)
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == output
    thought, message, called = output
    (part,) = thought["summary"] if summarizes else thought["content"]
    assert part["text"] == "so"
    assert thought["encrypted_content"] == sealed("so")
    assert message["content"][0]["text"] == "yes"
    assert (called["call_id"], called["name"]) == ("call_f", "f")
    assert called["arguments"] == '{"a": 1}'
    deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
    assert deltas == [chunk.text for chunk in chunks]
    assert [event["output_index"] for event in events] == sorted(
        event["output_index"] for event in events
    )


@pytest.mark.parametrize(
    ("chunks", "is_cut", "statuses"),
    [
        ([text("yes")], False, ["incomplete"]),
        ([text("so", SO)], False, ["incomplete"]),
        ([text("yes"), call('{"a', "f")], True, ["completed", "incomplete"]),
        ([call("{}", "f")], False, ["completed"]),
        ([], False, []),
    ],
)
def test_the_item_that_a_limit_cuts_is_incomplete(
    chunks: list[Chunk], is_cut: bool, statuses: list[str]
) -> None:
    _, output = told(chunks, is_complete=False, is_cut=is_cut)
    assert [item["status"] for item in output] == statuses


def test_scores_of_tokens_without_text_open_no_message() -> None:
    """They belong to the text that follows, be it the end of a character, if there is any."""
    options = {"tells_thoughts": True, "summarizes": False, "seals_thoughts": False}
    output = Output(lambda name: (None, name), **options)
    list(output.push(call("{}", "f"), []))
    assert list(output.push(text(""), [1])) == []
    assert len(output.documents()) == 1
    deltas = [e for e in output.push(text("é"), [2]) if e["type"].endswith("text.delta")]
    assert [delta["logprobs"] for delta in deltas] == [[1, 2]]


def test_a_thought_that_nobody_asked_to_hear_is_no_item() -> None:
    events, output = told([text("so", SO), text("yes")], tells_thoughts=False)
    assert (shape(events), [item["type"] for item in output]) == (OF_TEXT, ["message"])


def test_openai_reads_each_item() -> None:
    _, output = told([text("so", SO), text("yes"), call("{}", "f")], seals_thoughts=True)
    kinds = [item.type for item in Response.model_validate(response(output)).output]
    assert kinds == ["reasoning", "message", "function_call"]


def response(output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{"id": "r", "created_at": 0, "model": "m", "object": "response", "output": output},
        **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
    }
