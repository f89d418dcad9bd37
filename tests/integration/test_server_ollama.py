"""Ollama's API, as the client that Ollama publishes uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from fixtures.echo_model import CLOSED, OPENED, SWITCHED, open_echo
from fixtures.server_requests import HELLO

ollama: Any = pytest.importorskip("ollama")

FEW = {"num_predict": 12, "num_ctx": 4096, "temperature": 0}


@pytest.fixture
def user(client: httpx.Client) -> Iterator[Any]:
    with ollama.Client(host=str(client.base_url)) as opened:
        yield opened


@pytest.fixture
def expected(served: Engine) -> str:
    return served.chat(HELLO, max_tokens=12).text


def test_a_chat(user: Any, expected: str) -> None:
    answer = user.chat("tiny:latest", messages=HELLO, options=FEW, keep_alive="5m")
    assert answer.message.content == expected
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 12)
    told = list(user.chat("tiny", messages=HELLO, options=FEW, stream=True))
    assert "".join(chunk.message.content for chunk in told) == expected
    assert [chunk.done for chunk in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].prompt_eval_count == answer.prompt_eval_count


def test_a_stream_is_what_is_sent_unless_asked_otherwise(client: httpx.Client) -> None:
    response = client.post("/api/chat", json={"messages": HELLO, "options": FEW})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line)["model"] == "tiny" for line in response.text.splitlines())


def test_a_form(user: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    options = {"num_predict": 60}
    told = user.chat("tiny", messages=HELLO, format=schema, options=options).message.content
    assert 10 <= json.loads(told)["age"] <= 99
    assert user.chat("tiny", messages=HELLO, format="json", options=FEW).message.content[0] == "{"
    assert user.generate("tiny", "abc", raw=True, format="json", options=FEW).response[0] == "{"


def test_models(user: Any, client: httpx.Client) -> None:
    (model,) = user.list().models
    assert model.model == "tiny"
    assert [each.model for each in user.ps().models] == ["tiny"]
    shown = user.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["llama.context_length"] == 1024
    assert client.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"model": "llama9"}, "There is no model 'llama9' here."),
        ({"messages": [{"role": "user", "content": "a", "images": ["YQ=="]}]}, "images is not su"),
        ({"options": {"mirostat": 2}}, "mirostat is no field that is known here"),
        ({"options": {"num_predic": 2}}, "num_predic is no field that is known here"),
        ({"options": {"top_k": "a"}}, 'top_k: "a" should be a valid integer.'),
        ({"think": "a b"}, "think: String should match"),
        ({"options": [1]}, "options should be an object."),
        ({"format": "xml"}, "format is no form that is known here: send json"),
    ],
)
def test_a_refusal_is_in_its_form(client: httpx.Client, asked: dict[str, Any], told: str) -> None:
    response = client.post("/api/chat", json={"messages": HELLO, "model": "tiny", **asked})
    assert response.status_code in (400, 404)
    assert list(response.json()) == ["error"]
    assert told in response.json()["error"]


@pytest.fixture(scope="module")
def thinker() -> Iterator[Any]:
    """A model that answers with the last message, and thinks unless it is told not to."""
    with (
        open_echo(opening=SWITCHED) as engine,
        RunningServer(engine, ServerOptions(port=0, parallel=1)) as running,
        ollama.Client(host=running.url) as opened,
    ):
        yield opened


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("think", "before", "thought"),
    [(None, OPENED, "so"), (True, OPENED, "so"), ("high", OPENED, "so"), (False, CLOSED, None)],
)
def test_a_thought_stands_beside_the_text(
    thinker: Any, think: Any, before: str, thought: str | None
) -> None:
    text = f"{before}so\n</think>\n\nyes" if thought else f"{before}yes"
    whole = thinker.chat("echo", said(text), think=think)
    assert (whole.message.thinking, whole.message.content) == (thought, "yes")
    streamed = list(thinker.chat("echo", said(text), think=think, stream=True))
    assert "".join(each.message.thinking or "" for each in streamed) == (thought or "")
    assert "".join(each.message.content for each in streamed) == "yes"
    assert thinker.generate("echo", text, think=think).thinking == thought


def test_calls_of_tools(thinker: Any) -> None:
    def read(path: str, line: int) -> str:
        """Reads a line of a file.

        Args:
            path: of the file
            line: its number
        """
        return f"{path}:{line}"

    arguments = {"path": "a", "line": 3}
    written = json.dumps({"name": "read", "arguments": arguments})
    messages = said(f"{CLOSED}<tool_call>\n{written}\n</tool_call>")
    asked = {"messages": messages, "tools": [read], "think": False}
    answer = thinker.chat("echo", **asked)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("read", arguments)
    streamed = list(thinker.chat("echo", **asked, stream=True))
    assert [each.message.tool_calls for each in streamed if each.message.tool_calls] == [[call]]
    assert not any(each.message.content for each in streamed)
    cut = thinker.chat("echo", **asked, options={"num_predict": 50})
    assert (cut.message.tool_calls, cut.done_reason) == (None, "length")
    result = {"role": "tool", "tool_name": "read", "content": read(**call.function.arguments)}
    again = [*messages, answer.message, result, *said(f"{CLOSED}done")]
    assert thinker.chat("echo", again, think=False).message.content == "done"


def test_a_model_without_a_prompt_is_only_opened(thinker: Any) -> None:
    for told in (thinker.generate("echo", ""), thinker.chat("echo", [])):
        assert told.done and told.done_reason == "load"
