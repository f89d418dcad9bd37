"""Clients that hang, leave or ask too much: the others do not notice, and slots come back."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.apps.server.answer import ServerAnswer
from edge_spec.apps.server.errors import ApiError
from fixtures.server_requests import CHAT, COMPLETIONS, events_of, figure, let_until_free, until

Serve = Callable[..., httpx.Client]
LONG = {"prompt": "hello", "max_tokens": 500, "stream": True}


@contextmanager
def connected(client: httpx.Client) -> Iterator[socket.socket]:
    url = client.base_url
    with socket.create_connection((url.host, url.port), timeout=30) as opened:
        yield opened


def raw(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def read_until(opened: socket.socket, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        piece = opened.recv(4096)
        assert piece, got
        got += piece
    return got


def test_a_client_that_leaves_frees_its_slot_within_a_round(serve: Serve, gate: Any) -> None:
    client = serve(parallel=1)
    with connected(client) as opened:
        opened.sendall(raw(COMPLETIONS, LONG))
        gate.let(3)
        read_until(opened, b'"text"')
        for _ in range(4):
            gate.await_pass()  # three have gone on, the fourth waits
    until(client, "edge_spec_slots_busy", 1)
    let_until_free(client, gate)
    assert figure(client, "edge_spec_predicted_tokens_total") < 100


def test_a_client_that_leaves_the_queue_is_not_answered(serve: Serve, gate: Any) -> None:
    client = serve(parallel=1)
    with connected(client) as first:
        first.sendall(raw(COMPLETIONS, {**LONG, "max_tokens": 3}))
        gate.await_pass()
        with connected(client) as second:
            second.sendall(raw(COMPLETIONS, LONG))
            until(client, "edge_spec_queue_length", 1)
        until(client, "edge_spec_queue_length", 0)
        gate.end()
        read_until(first, b"[DONE]")
    until(client, "edge_spec_slots_busy", 0)
    assert figure(client, "edge_spec_predicted_tokens_total") == 3


def test_those_that_wait_are_served_in_turn_and_too_many_are_refused(
    serve: Serve, gate: Any
) -> None:
    client = serve(parallel=1, queue=2)
    body = {"prompt": "hello", "max_tokens": 2}
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(client.post, COMPLETIONS, json=body)]
        gate.await_pass()
        for waiting in (1, 2):
            answers.append(threads.submit(client.post, COMPLETIONS, json=body))
            until(client, "edge_spec_queue_length", waiting)
        refused = client.post(COMPLETIONS, json=body)
        gate.end()
        assert [answer.result().status_code for answer in answers] == [200] * 3
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "overloaded"


def test_nobody_waits_longer_than_the_queue_allows(serve: Serve, gate: Any) -> None:
    client = serve(parallel=1, queue_timeout_s=0.05)
    with connected(client) as opened:
        opened.sendall(raw(COMPLETIONS, LONG))
        gate.await_pass()
        refused = client.post(COMPLETIONS, json={"prompt": "hello"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "waited too long" in refused.json()["error"]["message"]
        assert figure(client, "edge_spec_queue_length") == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_takes_too_long_is_cut(
    serve: Serve, gate: Any, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """Choices after it have a token each, and usage is told."""
    client, cut, cancel = serve(parallel=1, request_timeout_s=0.05), Event(), ServerAnswer.cancel
    in_third = Event()

    def told(answer: ServerAnswer, *reason: ApiError) -> None:
        assert in_third.wait(30)  # however long the first passes take
        cancel(answer, *reason)
        cut.set()

    monkeypatch.setattr(ServerAnswer, "cancel", told)
    gate.let(2)
    with ThreadPoolExecutor(1) as thread:
        more = {"stream": is_streamed, "stream_options": {"include_usage": True}, "n": 2}
        asked = thread.submit(client.post, COMPLETIONS, json=LONG | more)
        for _ in range(3):
            gate.await_pass()
        in_third.set()
        assert cut.wait(30)
        gate.end()
        text = asked.result().text
    told = events_of(text) if is_streamed else [json.loads(text)]
    choices = [choice for each in told for choice in each["choices"]]
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices]
    assert [end for end in ends if end[1]] == [(0, "length"), (1, "length")]
    assert told[-1]["usage"]["completion_tokens"] == 3 + 1


def test_a_client_that_does_not_read_blocks_nobody(serve: Serve) -> None:
    client = serve(parallel=2)
    body = {**LONG, "max_tokens": 900, "n": 16, "logprobs": 20, "speculative": {"tokens": True}}
    with connected(client) as hanging:
        hanging.sendall(raw(COMPLETIONS, body))
        until(client, "edge_spec_slots_busy", 1)
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    until(client, "edge_spec_slots_busy", 0)
    assert figure(client, "edge_spec_predicted_tokens_total") < 16 * 900


def test_a_body_that_never_ends_is_refused(serve: Serve) -> None:
    client = serve(client_timeout_s=1.0)
    with connected(client) as half:
        half.sendall(raw(CHAT, {"messages": []})[:-3])
        assert b" 408 " in read_until(half, b"too long")


def test_a_connection_that_is_kept_may_ask_again_later(serve: Serve) -> None:
    client = serve(client_timeout_s=5)
    with connected(client) as opened:
        for _ in range(3):
            opened.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in read_until(opened, b"ok")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(serve: Serve, chunked: bool) -> None:
    client = serve(max_body_bytes=1 << 20)
    whole = b" " * (20 << 20 if chunked else 10 << 20)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(whole), 1 << 16):
            yield whole[start : start + (1 << 16)]

    refused = client.post(
        CHAT,
        content=pieces() if chunked else whole,
        headers={"content-type": "application/json"},
    )
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"
    assert client.get("/health").status_code == 200


def test_a_body_without_an_end_is_cut(serve: Serve) -> None:
    client = serve(max_body_bytes=1000)

    def forever() -> Iterator[bytes]:
        while True:
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    with suppress(httpx.TransportError):  # it may still be sending when it is cut
        assert client.post(CHAT, content=forever(), headers=headers).status_code == 413
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("grace_s", [30.0, 0.0])
def test_a_server_that_ends_lets_answers_end_within_the_time_of_grace(
    served: Engine, gate: Any, grace_s: float
) -> None:
    with RunningServer(served, ServerOptions(port=0, parallel=1, grace_s=grace_s)) as running:
        opened = socket.create_connection(("127.0.0.1", running.port), timeout=30)
        opened.sendall(raw(COMPLETIONS, {**LONG, "max_tokens": 20}))
        gate.await_pass()
        gate.end()
    with opened:
        got = read_until(opened, b"[DONE]")
    if grace_s:
        assert b'"predicted_n": 20' in got
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", running.port), timeout=5)
