"""An answer that is stopped from outside before its first token is an error with its reason, in
every API, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.apps.server.answer import ServerAnswer
from edge_spec.apps.server.errors import ApiError, shutting_down, timed_out
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.reference.model import ReferenceSession
from fixtures import infill_models

LONG = "a b c d e f g h i j " * 20
MESSAGES = [{"role": "user", "content": LONG}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object"}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "response_format": SCHEMA},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": LONG},
    "/infill": {"input_prefix": LONG, "input_suffix": "z"},
    "/v1/fim/completions": {"prompt": LONG, "suffix": "z"},
}
REASONS = {"shutdown": shutting_down, "time-out": timed_out}


@pytest.fixture
def coder(tmp_path: Path) -> Iterator[Engine]:
    """One that has read nothing yet: what others have read would be taken up."""
    path = tmp_path / "tiny"
    infill_models.write_model(path, max_position_embeddings=2048)
    options = LoadOptions(runtime="reference", context_length=2048)
    with load_engine(str(path), options, lambda what, fraction: None) as engine:
        yield engine


class HeldReading:
    """Holds the reading of prompts after its first pass, and knows the answers that are begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_read, self._goes_on = Event(), Event()
        self.answers: list[ServerAnswer] = []
        prefill, begin = ReferenceSession.prefill, ServerAnswer.__init__

        def hold(session: ReferenceSession, tokens: Any) -> None:
            prefill(session, tokens)
            self.is_read.set()
            assert self._goes_on.wait(30)

        def keep(answer: ServerAnswer, *given: Any) -> None:
            self.answers.append(answer)  # before the answer begins in its thread
            begin(answer, *given)

        monkeypatch.setattr(ReferenceSession, "prefill", hold)
        monkeypatch.setattr(ServerAnswer, "__init__", keep)

    def stop(self, reason: ApiError) -> None:
        """Stops the answer whose prompt is being read."""
        self.answers[-1].cancel(reason)
        self._goes_on.set()

    def let(self) -> None:
        self._goes_on.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, coder: Engine) -> Iterator[HeldReading]:
    reading = HeldReading(monkeypatch)
    yield reading
    reading.let()


def failure_of(path: str, response: httpx.Response, *, is_streamed: bool) -> dict[str, Any]:
    """The error as the clients of each API find it, after nothing of an answer."""
    if not is_streamed:
        return error_in(response.json())
    assert response.status_code == 200
    if path.startswith("/api/"):
        return error_in(json.loads(response.text.splitlines()[-1]))
    events = [each for each in response.text.split("\n\n") if each and not each.endswith("[DONE]")]
    name, _, data = events[-1].rpartition("data: ")
    told = json.loads(data)
    if path == "/v1/messages":
        assert name == "event: error\n"
    if path == "/v1/responses":
        assert name == "event: response.failed\n"
        assert told["response"]["status"] == "failed" and told["response"]["output"] == []
        told = told["response"]
    for event in events[:-1]:
        assert 'finish_reason": "' not in event and 'stop_reason": "' not in event
    return error_in(told)


def error_in(document: dict[str, Any]) -> dict[str, Any]:
    error = document["error"]
    return {"message": error} if isinstance(error, str) else error


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("path", REQUESTS)
def test_an_answer_without_a_token_is_an_error(
    coder: Engine, held: HeldReading, path: str, reason: str, is_streamed: bool
) -> None:
    stopped = REASONS[reason]()
    with ExitStack() as opened:
        engine = opened.enter_context(coder.fork())
        running = opened.enter_context(RunningServer(engine, ServerOptions(port=0, parallel=1)))
        client = opened.enter_context(httpx.Client(base_url=running.url, timeout=30))
        thread = opened.enter_context(ThreadPoolExecutor(1))
        body = {**REQUESTS[path], "stream": is_streamed}
        asked = thread.submit(client.post, path, json=body)
        assert held.is_read.wait(30)
        held.stop(stopped)
        response = asked.result()
        if not is_streamed:
            assert response.status_code == stopped.status
            assert response.headers.get("retry-after") == stopped.headers.get("Retry-After")
        error = failure_of(path, response, is_streamed=is_streamed)
        assert error["message"].startswith(f"{stopped.message} 256 of ")
        assert error["message"].endswith(" were read; asking again goes on from there.")
        again = client.post(path, json={**body, "max_tokens": 2})  # it does
        assert again.status_code == 200
        scored = next(
            float(line.split()[-1])
            for line in client.get("/metrics").text.splitlines()
            if line.startswith('edge_spec_prompt_tokens_total{source="cache"}')
        )
        assert scored >= 256


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_server_that_ends_tells_whoever_waits_for_a_first_token(
    coder: Engine, held: HeldReading, is_streamed: bool
) -> None:
    with ExitStack() as opened:
        engine = opened.enter_context(coder.fork())
        running = RunningServer(engine, ServerOptions(port=0, parallel=1, grace_s=0.0))
        thread = opened.enter_context(ThreadPoolExecutor(1))
        with running:
            body = {"prompt": LONG, "stream": is_streamed}
            url = f"{running.url}/v1/completions"
            asked = thread.submit(httpx.post, url, json=body, timeout=30)
            assert held.is_read.wait(30)
            running._server.should_exit = True
            while held.answers[-1]._stopped is None:
                pass
            held.let()
            response = asked.result()
    error = failure_of("/v1/completions", response, is_streamed=is_streamed)
    assert error["message"].startswith("The server is shutting down. 256 of ")
    assert is_streamed or response.status_code == 503


def test_a_time_out_counts_from_the_first_token(coder: Engine, held: HeldReading) -> None:
    """Reading is not limited; the second of two prompts is read when the time has passed."""
    limits = ServerOptions(port=0, parallel=1, request_timeout_s=0.01)
    with (
        coder.fork() as engine,
        RunningServer(engine, limits) as running,
        ThreadPoolExecutor(1) as thread,
    ):
        url = f"{running.url}/v1/completions"
        body = {"prompt": ["a", LONG], "max_tokens": 1}
        asked = thread.submit(httpx.post, url, json=body, timeout=30)
        assert held.is_read.wait(30)
        while held.answers[-1]._stopped is None:
            pass
        held.let()
        response = asked.result()
        assert response.status_code == 504
        message = response.json()["error"]["message"]
        assert "256 of " in message and " of answer 2 of 2 were read;" in message
        alone = httpx.post(url, json={"prompt": LONG, "max_tokens": 1}, timeout=30)
        assert alone.json()["choices"][0]["text"]
