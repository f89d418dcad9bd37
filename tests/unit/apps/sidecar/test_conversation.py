"""An answer of the sidecar that the model fails in."""

from __future__ import annotations

import json
from queue import Queue
from threading import Event
from typing import Any

import pytest

from edge_spec.apps.sidecar.sidecar import (
    MAX_QUEUED,
    Job,
    RpcError,
    Sidecar,
    SidecarConversation,
)
from edge_spec.errors import UsageError
from fixtures.faults import Fault, FaultKind, FaultyModel


def test_an_error_brings_what_was_written_and_the_next_answer_is_right(
    make_engine: Any, remembers_all: Any
) -> None:
    faulty = FaultyModel(remembers_all(), [Fault(FaultKind.RAISES, "forward", 4)])
    sent: Queue[dict[str, Any]] = Queue()
    conversation = SidecarConversation(sent.put, lambda: make_engine(faulty))

    def answer(engine: Any) -> Any:
        return engine.generate([1, 2, 3], max_tokens=6, stream=True)

    def response() -> tuple[str, dict[str, Any]]:
        """The text of the chunks, and what follows them."""
        text = ""
        while "params" in (message := sent.get(timeout=60)):
            text += message["params"]["text"]
        return text, message

    for id in (1, 2):
        conversation.submit(Job(id, answer))
    text, failed = response()
    error = failed["error"]
    assert error["code"] == -32000 and error["data"]["type"] == "SessionError"
    produced = error["data"]["result"]
    assert produced["text"] == text and produced["finish_reason"] == "error"
    assert produced["stats"]["predicted_n"] == 3
    again, answered = response()
    assert answered["result"]["text"] == again and again.startswith(text)
    assert answered["result"]["finish_reason"] == "length"
    conversation.end().result(60)


def test_an_answer_that_is_cancelled_before_its_first_token_is_an_error(
    make_engine: Any, remembers_all: Any
) -> None:
    sent: Queue[dict[str, Any]] = Queue()
    engine = make_engine(remembers_all(2048))
    prefill = engine._session.prefill

    def cancelling(tokens: Any) -> None:
        prefill(tokens)
        job.stop.request()

    engine._session.prefill = cancelling
    conversation = SidecarConversation(sent.put, lambda: engine)
    job = Job(1, lambda engine: engine.generate([120] * 1000, max_tokens=6, stream=True))
    conversation.submit(job)
    error = sent.get(timeout=60)["error"]
    assert error["code"] == -32800
    assert "of 1000 tokens of the prompt were read; asking again goes on" in error["message"]
    del engine._session.prefill
    conversation.submit(Job(2, job.do))
    while "result" not in (answered := sent.get(timeout=60)):
        assert answered["method"] == "chunk"
    held = int(error["message"].split()[2])
    assert answered["result"]["stats"]["cached_n"] == held > 0
    conversation.end().result(60)


def test_a_result_that_json_cannot_hold_is_an_error_of_its_request_alone(
    make_engine: Any, remembers_all: Any
) -> None:
    sent: Queue[dict[str, Any]] = Queue()

    def send(message: dict[str, Any]) -> None:
        json.dumps(message, allow_nan=False)
        sent.put(message)

    conversation = SidecarConversation(send, lambda: make_engine(remembers_all()))
    conversation.submit(Job(1, lambda engine: {"note": float("inf")}))
    conversation.submit(Job(2, lambda engine: 2))
    failed, answered = (sent.get(timeout=60) for _ in range(2))
    assert failed["id"] == 1 and failed["error"]
    assert answered["result"] == 2
    conversation.end().result(60)


def test_a_sidecar_that_was_asked_nothing_frees_its_model(
    make_engine: Any, remembers_all: Any
) -> None:
    engine = make_engine(remembers_all())
    sidecar = Sidecar(engine, lambda message: None)
    sidecar.handle(b'{"jsonrpc": "2.0", "id": 1, "method": "shutdown"}')
    with pytest.raises(UsageError, match="closed"):
        engine.generate([1])


def test_only_so_many_requests_wait(make_engine: Any, remembers_all: Any) -> None:
    go_on, sent = Event(), Queue[dict[str, Any]]()
    conversation = SidecarConversation(sent.put, lambda: make_engine(remembers_all()))
    for id in range(1 + MAX_QUEUED):
        conversation.submit(Job(id, lambda engine: go_on.wait(60)))
    with pytest.raises(RpcError, match="wait already"):
        conversation.submit(Job("one more", lambda engine: None))
    go_on.set()
    conversation.end().result(60)
    assert [sent.get()["id"] for _ in range(1 + MAX_QUEUED)] == list(range(1 + MAX_QUEUED))
    assert not conversation.jobs
