"""Several models of one server: opened when they are asked for, closed for one another."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.apps.server.models import Models
from edge_spec.cli.options import SamplingOptions
from edge_spec.loader import ModelOnDemand, load_asked
from edge_spec.models import memory as fitting
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import Bundle
from edge_spec.models.memory import Forecast
from fixtures.gate import Gate
from fixtures.server_requests import COMPLETIONS, answered, until
from fixtures.silence import quiet

MODELS = "/v1/models"
NAMES = ("llama", "qwen3", "qwen2")


class Openings:
    """Opens tiny models, and knows which were opened, in order."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.engines: list[Engine] = []
        self.gate = Gate()
        self.holds = False  # whether openings wait at the gate, but for the first one

    def open(self, path: Path, runtime: str, *, report: Any, screen: Any) -> Engine:
        self.opened.append(path.name)
        if self.holds and len(self.opened) > 1:
            self.gate.pass_through()
        asked = AskedOptions(runtime=runtime)
        engine = load_asked(str(path), asked, report or quiet, screen=screen)
        self.engines.append(engine)
        return engine

    def model(self, path: Path, runtime: str = "reference", *aliases: str) -> ModelOnDemand:
        return ModelOnDemand(path.name, partial(self.open, path, runtime), aliases)

    @property
    def num_open(self) -> int:
        return sum(not engine._closed for engine in self.engines)


@pytest.fixture(scope="module", autouse=True)
def findings(hf: Callable[..., Path]) -> None:
    """What opening finds out of a model's rows is kept by then, in whichever order tests run: it
    would wait at a gate."""
    for name in NAMES:
        load_asked(str(hf(name)), AskedOptions(runtime="reference"), quiet).close()


@pytest.fixture
def openings() -> Iterator[Openings]:
    made = Openings()
    yield made
    made.gate.end()
    assert made.num_open == 0  # a server closes what it opened


@pytest.fixture
def start(openings: Openings) -> Iterator[Callable[..., httpx.Client]]:
    """start(models, **options): a client of a server of them, on one slot each."""
    with ExitStack() as opened:

        def serve(models: list[ModelOnDemand], **options: Any) -> httpx.Client:
            settings = {
                "port": 0,
                "parallel": 1,
                "grace_s": 0.0,
                "sampling": SamplingOptions(8),
            } | options
            running = opened.enter_context(RunningServer(models, ServerOptions(**settings)))
            return opened.enter_context(httpx.Client(base_url=running.url, timeout=30))

        yield serve


@pytest.fixture
def serve(
    openings: Openings, hf: Callable[..., Path], start: Callable[..., httpx.Client]
) -> Callable[..., httpx.Client]:
    """serve(**options): of three models on the numpy runtime; the second has an alias."""

    def serve_three(**options: Any) -> httpx.Client:
        aliases = {"qwen3": ["small"]}
        models = [openings.model(hf(name), "reference", *aliases.get(name, [])) for name in NAMES]
        return start(models, **options)

    return serve_three


def ask(client: httpx.Client, model: str | None, **more: Any) -> dict[str, Any]:
    body = {"prompt": "hello", **({} if model is None else {"model": model}), **more}
    return answered(client.post(COMPLETIONS, json=body))


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = response.json()["error"]
    return error


def loaded(client: httpx.Client) -> set[str]:
    data = client.get(MODELS).json()["data"]
    return {model["id"] for model in data if model["status"]["value"] == "loaded"}


def of_model(name: str, model: str) -> str:
    return f'{name}{{model="{model}"}}'


def text_of(path: Path) -> str:
    asked = AskedOptions(runtime="reference", drafter="none")
    with load_asked(str(path), asked, quiet) as engine:
        return engine.generate("hello", max_tokens=8).text


def test_each_model_answers_for_itself_and_is_opened_when_it_is_asked_for(
    serve: Callable[..., httpx.Client], openings: Openings, hf: Callable[..., Path]
) -> None:
    client = serve()
    assert openings.opened == ["llama"]
    expected = {name: text_of(hf(name)) for name in NAMES}
    assert len(set(expected.values())) == 3
    for asked, name in (("qwen3", "qwen3"), (None, "llama"), ("small", "qwen3")):
        answer = ask(client, asked)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
    assert openings.opened == ["llama", "qwen3"]
    assert loaded(client) == {"llama", "qwen3"}


def test_all_models_are_listed_with_their_aliases_and_whether_they_are_open(
    serve: Callable[..., httpx.Client],
) -> None:
    client = serve()
    listed = client.get(MODELS).json()
    told = [(each["id"], each["aliases"], each["status"]["value"]) for each in listed["data"]]
    assert told == [
        ("llama", [], "loaded"),
        ("qwen3", ["small"], "unloaded"),
        ("qwen2", [], "unloaded"),
    ]
    assert client.get(f"{MODELS}/small").json() == listed["data"][1]
    for error in (
        refusal(client.get(f"{MODELS}/gpt-9"), 404),
        refusal(client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt-9"}), 404),
    ):
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'llama', 'qwen3', 'qwen2'" in error["message"]


def test_requests_for_a_model_that_is_being_opened_open_it_once(
    serve: Callable[..., httpx.Client], openings: Openings
) -> None:
    client, openings.holds = serve(parallel=3), True
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, client, "qwen3") for _ in range(3)]
        until(client, of_model("edge_spec_queue_length", "qwen3"), 3)
        assert client.get(f"{MODELS}/qwen3").json()["status"]["value"] == "loading"
        assert ask(client, "llama")["model"] == "llama"  # the others go on
        openings.gate.end()
        assert len({each.result()["choices"][0]["text"] for each in asked}) == 1
    assert openings.opened == ["llama", "qwen3"]


def test_the_least_recently_used_one_makes_room(
    serve: Callable[..., httpx.Client], openings: Openings
) -> None:
    client = serve(max_models=2)
    for name in ("qwen3", "llama", "qwen2"):
        ask(client, name)
    assert loaded(client) == {"llama", "qwen2"}
    assert openings.num_open == 2
    ask(client, "qwen3")
    assert loaded(client) == {"qwen3", "qwen2"}
    assert openings.opened == ["llama", "qwen3", "qwen2", "qwen3"]


def test_a_model_that_is_used_is_not_closed_and_its_next_request_waits_its_turn(
    serve: Callable[..., httpx.Client], openings: Openings, hf: Callable[..., Path], gate: Any
) -> None:
    client = serve(max_models=1)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(ask, client, "llama")
        gate.await_pass()
        other = threads.submit(ask, client, "qwen3")
        until(client, of_model("edge_spec_queue_length", "qwen3"), 1)
        # It waits behind the other model where that is waiting for its place already, and goes on
        # at once where it does not yet: both are answered.
        later = threads.submit(ask, client, "llama")
        assert not other.done()
        gate.end()
        answers = [each.result() for each in (first, other, later)]
    texts = [each["choices"][0]["text"] for each in answers]
    expected = {name: text_of(hf(name)) for name in ("llama", "qwen3")}
    assert texts == [expected["llama"], expected["qwen3"], expected["llama"]]
    assert len(loaded(client)) == 1


def test_nobody_waits_for_a_model_longer_than_was_said(
    serve: Callable[..., httpx.Client], openings: Openings
) -> None:
    client, openings.holds = serve(load_timeout_s=0.05), True
    refused = client.post(COMPLETIONS, json={"prompt": "a", "model": "qwen3"})
    assert refusal(refused, 429)["code"] == "overloaded"
    assert refused.headers["retry-after"]
    openings.gate.end()
    until(client, of_model("edge_spec_model_loaded", "qwen3"), 1)  # it was opened all the same
    ask(client, "qwen3")
    assert openings.opened == ["llama", "qwen3"]


@contextmanager
def asking(client: httpx.Client, model: str) -> Iterator[None]:
    """A client that asks, and has left after the block."""
    url, content = client.base_url, json.dumps({"prompt": "a", "model": model}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port), timeout=30) as opened:
        opened.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        until(client, of_model("edge_spec_queue_length", model), 1)
        yield
    until(client, of_model("edge_spec_queue_length", model), 0)


def test_nobody_makes_room_for_a_model_that_nobody_waits_for_any_more(
    serve: Callable[..., httpx.Client], openings: Openings, gate: Any
) -> None:
    client = serve(max_models=1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, client, "llama")
        gate.await_pass()
        with asking(client, "qwen3"):
            pass
        gate.end()
        assert first.result()["model"] == "llama"
    assert ask(client, "llama")["model"] == "llama"
    assert loaded(client) == {"llama"}
    assert len(openings.engines) == 1


def test_a_model_that_cannot_be_opened_is_told_and_the_others_go_on(
    openings: Openings,
    hf: Callable[..., Path],
    start: Callable[..., httpx.Client],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, gone = hf("qwen3"), tmp_path / "gone"
    client = start([openings.model(hf("llama")), openings.model(gone)])
    body = {"prompt": "hello", "model": "gone"}
    with caplog.at_level(logging.WARNING):
        refused = client.post(COMPLETIONS, json=body)
    error = refusal(refused, 500)
    assert (error["code"], error["param"]) == ("model_not_loaded", "model")
    assert "no such file or directory" in error["message"]
    assert "MODEL is" not in error["message"]  # what to type is not for clients
    assert refused.headers["x-should-retry"] == "false"
    assert "MODEL is" in caplog.text  # it is for whoever runs the server
    assert ask(client, "llama")["model"] == "llama"
    shutil.copytree(kept, gone)
    assert ask(client, "gone")["choices"][0]["text"] == text_of(kept)


@pytest.fixture
def sized(
    openings: Openings,
    exported: Callable[..., Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[ModelOnDemand]:
    """Two models on a runtime that knows what they take, and the files' cache."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    bundle = exported("llama").path
    paths = [Path(shutil.copytree(bundle, tmp_path / name)) for name in ("one", "two")]
    return [openings.model(path, "ort") for path in paths]


@pytest.fixture
def needed_together(sized: list[ModelOnDemand], openings: Openings) -> int:
    """Bytes of both."""
    forecasts: list[Forecast | None] = []

    def screen(placed: Any) -> None:
        forecasts.append(fitting.forecast_here(placed.target, placed.drafts))

    for model in sized:
        model.open(report=None, screen=screen).close()
    openings.opened.clear()
    models = [model for found in forecasts if found is not None for model in found.models]
    assert len(models) == 2
    return Forecast(tuple(models), None).needed


@pytest.mark.parametrize(("lacking", "stay"), [(0, {"one", "two"}), (1, {"two"})])
def test_models_stay_open_as_long_as_memory_holds_all_of_them(
    sized: list[ModelOnDemand],
    needed_together: int,
    start: Callable[..., httpx.Client],
    monkeypatch: pytest.MonkeyPatch,
    lacking: int,
    stay: set[str],
) -> None:
    monkeypatch.setattr(fitting, "total_bytes", lambda: needed_together - lacking)
    monkeypatch.setattr(fitting, "free_bytes", lambda: needed_together)
    client = start(sized)
    ask(client, "two")
    assert loaded(client) == stay


def test_what_other_programs_use_closes_idle_models_and_refuses_none(
    sized: list[ModelOnDemand],
    start: Callable[..., httpx.Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "free_bytes", lambda: 1000)
    client = start(sized)
    ask(client, "two")
    assert loaded(client) == {"two"}


def test_a_server_that_ends_sends_away_who_waits_for_a_model(
    openings: Openings, hf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [openings.model(hf("llama")), openings.model(hf("qwen3"))]
    discarded = Future[None]()
    close = Models.close

    def told(served: Models) -> None:
        discarded.set_result(None)  # the event loop has ended
        close(served)

    monkeypatch.setattr(Models, "close", told)
    openings.holds = True
    with ThreadPoolExecutor(2) as threads:
        with RunningServer(models, ServerOptions(port=0, parallel=1)) as running:
            url = f"{running.url}{COMPLETIONS}"
            body = {"prompt": "a", "model": "qwen3"}
            asked = threads.submit(httpx.post, url, json=body, timeout=30)
            openings.gate.await_pass()
            threads.submit(lambda: (discarded.result(30), openings.gate.end()))
        refused = asked.result()
    assert "shutting down" in refusal(refused, 503)["message"]
