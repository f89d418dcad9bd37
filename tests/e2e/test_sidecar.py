"""The sidecar as another application runs it: pipes, a conversation, every way to end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

DOCS = Path(__file__).parents[2] / "docs" / "desktop.md"
LONG = {"messages": "Tell a very long story."}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


class Sidecar:
    """A process and the pipes to it."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
        )

    def write(self, line: bytes) -> None:
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def send(self, method: str, id: object = None, /, **params: Any) -> None:
        request = {"jsonrpc": "2.0", "method": method, "params": params}
        self.write(json.dumps(request | ({} if id is None else {"id": id})).encode())

    def receive(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())

    def response(self, id: object) -> dict[str, Any]:
        """The next message with this id; others before it are dropped."""
        while (message := self.receive()).get("id") != id:
            pass
        return message

    def chunk(self, id: object) -> dict[str, Any]:
        while (message := self.receive()).get("params", {}).get("id") != id:
            pass
        return message["params"]

    def ask(self, method: str, id: object = 0, /, **params: Any) -> dict[str, Any]:
        self.send(method, id, **params)
        return self.response(id)

    def end(self) -> tuple[int, str]:
        """Waits for the end that something else causes: status and standard error."""
        status = self.process.wait(timeout=30)
        return status, self.process.stderr.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(BrokenPipeError):  # what was not written yet
                pipe.close()


Start = Callable[..., Sidecar]


@pytest.fixture
def start(command: list[str], converted: None, tmp_path: Path) -> Iterator[Start]:
    """Starts one; with `code`, Python that calls `run` in its own way."""
    started = []

    def begin(code: str | None = None) -> Sidecar:
        own = [sys.executable, "-c", code] if code else [*command, "serve", "smollm2", "--stdio"]
        started.append(Sidecar(own, tmp_path))
        return started[-1]

    yield begin
    for sidecar in started:
        sidecar.close()


@pytest.fixture(scope="module")
def shared(
    command: list[str], converted: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """One for all tests that leave it with nothing to do; conversations are their own."""
    sidecar = Sidecar([*command, "serve", "smollm2", "--stdio"], tmp_path_factory.mktemp("shared"))
    yield sidecar
    sidecar.close()


def test_the_page_of_protocol_is_true(start: Start) -> None:
    sidecar = start()
    exchanges = re.findall(r"```jsonrpc\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    for line in "".join(exchanges).splitlines():
        if line.startswith("> "):
            sidecar.write(line[2:].encode())
            continue
        told = json.loads(line[2:])
        found = sidecar.receive()
        while found.get("method") == "chunk" != told.get("method"):  # the page shows the first
            found = sidecar.receive()
        assert_like(told, found, line)
    assert sidecar.end() == (0, "")


def assert_like(told: Any, found: Any, where: str) -> None:
    """Whatever is told is there, of the same kind; what does not depend on the machine, the same.
    There may be more than is told."""
    assert type(told) is type(found) or None in (told, found), where
    if isinstance(told, dict):
        for name, value in told.items():
            assert name in found, f"{name}: {where}"
            assert_like(value, found[name], where)
            if name in ("jsonrpc", "id", "code", "message", "finish_reason", "note", "cancelled"):
                assert value == found[name] or ("tokens" in where and name == "id"), where
    elif isinstance(told, list) and told and found:
        assert_like(told[0], found[0], where)


def test_chunks_join_to_the_text_which_is_the_one_of_the_command_line(edge_spec, shared) -> None:
    sidecar = shared
    sidecar.send("chat", 1, messages=MESSAGES, options={"max_tokens": 24})
    text, tokens = "", []
    while "method" in (message := sidecar.receive()):
        text += message["params"]["text"]
        tokens += message["params"]["tokens"]
    done = edge_spec("generate", MESSAGES[0]["content"], "--max-tokens", "24", "--json")
    alone = json.loads(done.stdout)
    assert message["result"]["text"] == text == alone["text"]
    assert [token["id"] for token in tokens] == [token["id"] for token in alone["tokens"]]


def test_a_request_waits_for_the_one_before_it_in_its_conversation(shared: Sidecar) -> None:
    sidecar = shared
    sidecar.send("chat", "a", **LONG)
    sidecar.chunk("a")
    sidecar.send("chat", "b", **LONG)
    sidecar.send("chat", "c", conversation="other", messages=MESSAGES, options={"max_tokens": 4})
    assert sidecar.response("c")["result"]["finish_reason"] == "length"  # while "a" goes on
    of_main = sidecar.ask("stats")["result"]["conversations"]["main"]
    assert of_main["requests"] == ["a", "b"]
    assert sidecar.ask("cancel", 1, id="b")["result"] == {"cancelled": True}
    assert sidecar.ask("cancel", 2, id="nobody")["result"] == {"cancelled": False}
    sidecar.send("cancel", id="a")  # as a notification
    assert sidecar.response("a")["result"]["text"]
    assert sidecar.response("b")["error"]["code"] == -32800  # it never began


@pytest.mark.slow  # on the demo model
def test_queues_and_conversations_have_limits(start: Start) -> None:
    sidecar = start()
    limit = sidecar.ask("initialize")["result"]["max_conversations"]
    for number in range(limit):
        sidecar.send("chat", f"of {number}", conversation=str(number), **LONG)
    assert sidecar.ask("chat", "one more", conversation="more", **LONG)["error"]["code"] == -32001
    sidecar.chunk("of 1")
    for number in range(17):
        sidecar.send("chat", number, conversation="1", **LONG)
    assert sidecar.response(16)["error"]["code"] == -32001
    repeated = sidecar.ask("chat", 3, **LONG)["error"]
    assert (repeated["code"], "not answered yet" in repeated["message"]) == (-32600, True)
    sidecar.send("cancel", id=f"of {limit - 1}")
    sidecar.response(f"of {limit - 1}")  # it is idle now, and gives its place up
    told = sidecar.ask(
        "chat", "one more", conversation="more", messages="Hi", options={"stop": " "}
    )
    assert told["result"]["finish_reason"] == "stop"


def test_bad_lines_are_answered_and_change_nothing(shared: Sidecar) -> None:
    sidecar = shared
    for line, code in (
        (b"nonsense", -32700),
        (b"\xff\xfe", -32700),
        (b"", -32700),
        (b"[]", -32600),
        (b'"' + b"x" * 10_000_000 + b'"', -32600),
    ):
        sidecar.write(line)
        answer = sidecar.receive()
        assert (answer["id"], answer["error"]["code"]) == (None, code)
    full = sidecar.ask("generate", prompt="a " * 9000)["error"]
    assert (full["code"], full["data"]["type"]) == (-32000, "ContextFullError")
    sidecar.send("sing")  # a notification gets no answer, not even of an error
    assert sidecar.ask("generate", prompt="One, two,", options={"max_tokens": 2})["result"]


NOISY = """
import os, subprocess, edge_spec
from edge_spec.apps.sidecar import run

def noisy():
    print("printed")
    os.write(1, b"written\\n")
    subprocess.run("cat; echo of a child", shell=True)
    return edge_spec.load("smollm2")

run(noisy)
"""


def test_whatever_prints_does_not_reach_the_protocol(start: Start) -> None:
    sidecar = start(NOISY)
    assert sidecar.ask("initialize")["result"]["model"] == "smollm2"
    sidecar.process.stdin.close()
    assert sidecar.process.stdout.read() == b""
    status, errors = sidecar.end()
    assert status == 0
    assert set(errors.split("\n")) == {"printed", "written", "of a child", ""}


WAITING = """
import sys, threading
from edge_spec.apps.sidecar import run

def wait():
    print("waiting", file=sys.stderr, flush=True)
    threading.Event().wait()

run(wait)
"""


ANOTHER_THREAD = """
import os, signal, sys, threading, time
from types import SimpleNamespace
from edge_spec.apps.sidecar import run

def end_while_it_waits(main=threading.get_ident()):
    looks = 0
    while looks < 1000:
        time.sleep(0)  # the main thread goes on, if it can
        is_waiting = sys._current_frames()[main].f_code is run.__code__
        looks = looks + 1 if is_waiting else 0
    os.kill(os.getpid(), signal.SIGTERM)  # to this thread, the only one that lets it in
    threading.Event().wait()

threading.Thread(target=end_while_it_waits, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # also of threads that begin later
run(lambda: SimpleNamespace(close=lambda: None))
"""


def lose_input(sidecar: Sidecar) -> None:
    sidecar.process.stdin.close()


def terminate(sidecar: Sidecar) -> None:
    sidecar.process.send_signal(signal.SIGTERM)


def lose_output(sidecar: Sidecar) -> None:
    sidecar.process.stdout.close()


@pytest.mark.parametrize("cause", [lose_input])
def test_it_ends_while_the_model_is_opened(cause: Callable[[Sidecar], None], start: Start) -> None:
    sidecar = start(WAITING)
    sidecar.process.stderr.readline()
    cause(sidecar)
    assert sidecar.end() == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals there are no threads'")
def test_it_ends_where_the_system_gives_the_signal_to_another_thread(start: Start) -> None:
    sidecar = start(ANOTHER_THREAD)
    assert sidecar.end() == (0, "")


@pytest.mark.parametrize(
    "cause",
    [
        lose_input,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (terminate, lose_output)),
    ],
)
def test_it_ends_in_the_middle_of_answers(cause: Callable[[Sidecar], None], start: Start) -> None:
    sidecar = start()
    sidecar.send("chat", 1, **LONG)
    sidecar.send("chat", 2, conversation="other", **LONG)
    sidecar.chunk(1)
    sidecar.chunk(2)
    cause(sidecar)
    assert sidecar.end() == (0, "")


@pytest.mark.slow  # beside its ends in the middle of answers
def test_it_ends_where_the_application_neither_reads_nor_writes(start: Start) -> None:
    sidecar = start()
    sidecar.send("chat", 1, **LONG)
    sidecar.chunk(1)
    for _ in range(30):  # its answers fill the pipe, so that the process waits in a write
        sidecar.send("sing" * 1000, 2)
    sidecar.process.stdin.close()
    assert sidecar.end() == (0, "")


def test_a_model_that_cannot_be_opened_is_one_line(command: list[str], tmp_path: Path) -> None:
    sidecar = Sidecar([*command, "serve", "missing.gguf", "--stdio"], tmp_path)
    status, errors = sidecar.end()  # its input stays open until then
    assert (status, sidecar.process.stdout.read()) == (1, b"")
    assert "missing.gguf" in errors
    assert len(errors.splitlines()) == 1
    sidecar.close()
