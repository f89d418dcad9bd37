"""Messages and events of Anthropic's API, of answers with parts of all kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from edge_spec import FinishReason, GenerationResult
from edge_spec.apps.server.answer import Ended, Round
from edge_spec.apps.server.anthropic.parse import CountRequest
from edge_spec.apps.server.anthropic.write import MessageReply
from edge_spec.apps.server.errors import overloaded
from edge_spec.core.metrics import Stats
from edge_spec.engine.results import Chunk
from edge_spec.text.parts.part import CallHead, PartKind

THOUGHT, TEXT, CALL = PartKind.REASONING, PartKind.TEXT, PartKind.CALL
READ, LIST = CallHead(0, "toolu_1", "read"), CallHead(1, "toolu_2", "list")
LIMIT = 50
CANCELLED = {"finish_reason": FinishReason.CANCELLED}


def chunk(kind: PartKind, text: str, call: CallHead | None = None) -> Chunk:
    return Chunk(text, (), kind, call)


PARTS = [
    *(chunk(THOUGHT, ""), chunk(THOUGHT, "I "), chunk(THOUGHT, "read."), chunk(THOUGHT, "")),
    *(chunk(TEXT, "Let me"), chunk(TEXT, ""), chunk(TEXT, " see.")),
    *(chunk(CALL, "", READ), chunk(CALL, '{"path": '), chunk(CALL, '"a"}')),
    *(chunk(CALL, "{}", LIST), chunk(TEXT, "So.")),
]
BLOCKS = [
    {"type": "thinking", "thinking": "I read."},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
    {"type": "tool_use", "id": "toolu_2", "name": "list", "input": {}},
    {"type": "text", "text": "So."},
]


def result(**fields: Any) -> GenerationResult:
    stats = Stats(prompt_n=40, cached_n=30, predicted_n=20)
    return GenerationResult(**{"finish_reason": FinishReason.STOP, "stats": stats, **fields})


def replied(*, told: bool = True) -> MessageReply:
    return MessageReply("tiny", 40, LIMIT, tells_thoughts=told)


def rounds(chunks: Sequence[Chunk]) -> list[Round]:
    return [Round(0, each, 1, None, None) for each in chunks]


def events(chunks: Sequence[Chunk], ended: GenerationResult, **how: Any) -> list[dict[str, Any]]:
    reply = replied(**how)
    told = [reply.opening(), *map(reply.piece, rounds(chunks))]
    told += [reply.end(Ended(0, ended, 20, None, None)), reply.closing()]
    data = [each.split("\ndata: ")[1] for each in "".join(told).split("\n\n")[:-1]]
    return [json.loads(each) for each in data]


def whole(chunks: Sequence[Chunk], ended: GenerationResult, **how: Any) -> dict[str, Any]:
    reply = replied(**how)
    for each in rounds(chunks):
        reply.collect(each)
    return reply.document([ended])


def joined(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events."""
    message: dict[str, Any] = {}
    pieces: dict[str, str] = {}
    for event in told:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pieces = {}
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                delta = event["delta"]
                (name,) = delta.keys() - {"type"}
                pieces[name] = pieces.get(name, "") + delta[name]
            case "content_block_stop":
                if "partial_json" in pieces:
                    pieces["input"] = json.loads(pieces.pop("partial_json") or "{}")
                message["content"][-1] |= pieces
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def without_signature(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "signature"}


@pytest.mark.parametrize("told", [True, False])
def test_a_stream_joins_to_the_message_that_is_told_whole(told: bool) -> None:
    message = whole(PARTS, result(), told=told)
    streamed = joined(events(PARTS, result(), told=told))
    assert {**streamed, "id": ""} == {**message, "id": ""}
    shown = [*BLOCKS]
    if not told:
        shown[0] = {**BLOCKS[0], "thinking": ""}
    assert list(map(without_signature, message["content"])) == shown
    assert message["usage"]["input_tokens"] == 10
    assert message["usage"]["cache_read_input_tokens"] == 30
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("told", [True, False])
def test_a_client_that_sends_the_message_back_gives_the_model_its_thought(told: bool) -> None:
    said = {"role": "assistant", "content": whole(PARTS, result(), told=told)["content"]}
    asked = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "b"}]
    request = CountRequest.model_validate({"messages": asked}).for_chat()
    assert request.messages[1].reasoning_content == "I read."
    assert request.messages[1].content == "Let me see.So."


@pytest.mark.parametrize(
    ("chunks", "fields", "expected"),
    [
        ([chunk(TEXT, "a")], {}, ("end_turn", None)),
        ([], {}, ("end_turn", None)),
        ([chunk(TEXT, "a")], {"stop": "b"}, ("stop_sequence", "b")),
        ([chunk(TEXT, "a")], {"stop": ""}, ("stop_sequence", "")),
        ([chunk(CALL, "{}", READ)], {}, ("tool_use", None)),
        (
            [chunk(CALL, "{}", READ)],
            {"finish_reason": FinishReason.CANCELLED},
            ("max_tokens", None),
        ),
        (
            [chunk(TEXT, "a")],
            {"finish_reason": FinishReason.LENGTH, "stats": Stats(predicted_n=LIMIT)},
            ("max_tokens", None),
        ),
        (
            [chunk(TEXT, "a")],
            {"finish_reason": FinishReason.LENGTH, "stats": Stats(predicted_n=LIMIT - 1)},
            ("model_context_window_exceeded", None),
        ),
    ],
)
def test_why_a_message_ended(chunks: Any, fields: dict[str, Any], expected: Any) -> None:
    message = whole(chunks, result(**fields))
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert joined(events(chunks, result(**fields)))["stop_reason"] == expected[0]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [("", {}), ('{"path": "a', {}), ('{"n": 1, "path": "a', {"n": 1}), ('{"n": 1}', {"n": 1})],
)
def test_of_a_call_that_was_cut_the_message_has_what_is_complete(arguments: str, kept: Any) -> None:
    cut = result(finish_reason=FinishReason.LENGTH, stats=Stats(predicted_n=LIMIT), is_cut=True)
    message = whole([chunk(CALL, arguments, READ)], cut)
    assert message["content"] == [
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": kept}
    ]
    assert message["stop_reason"] == "max_tokens"


def test_a_stream_that_waits_or_fails_says_so() -> None:
    reply = replied()
    assert reply.waiting() == 'event: ping\ndata: {"type": "ping"}\n\n'
    name, data = reply.failure(overloaded("Too many.")).strip().split("\n")
    assert name == "event: error"
    error = {"type": "rate_limit_error", "message": "Too many."}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}


def test_events_are_those_that_its_client_knows() -> None:
    types = pytest.importorskip("anthropic.types")
    from pydantic import TypeAdapter

    known: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    for event in events(PARTS, result()):
        if event["type"] != "ping":
            known.validate_python(event)
    types.Message.model_validate(whole(PARTS, result()))
