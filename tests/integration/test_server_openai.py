"""The client that OpenAI publishes, as its users use it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel, Field

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from fixtures.server_requests import HELLO


@pytest.fixture(scope="module")
def url(served_once: Engine) -> Iterator[str]:
    options = ServerOptions(port=0, parallel=2, api_key="secret")
    with served_once.fork() as engine, RunningServer(engine, options) as running:
        yield f"{running.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as opened:
        yield opened


@pytest.fixture
def expected(served: Engine) -> str:
    return served.chat(HELLO, max_tokens=20).text


def test_an_answer(client: openai.OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert answer.timings["predicted_n"] == 20


def test_a_stream(client: openai.OpenAI, expected: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculative": {"tokens": True}},
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected
    assert chunks[-1].usage.completion_tokens == 20
    assert sum(len(chunk.edge_spec["tokens"]) for chunk in chunks[1:-1]) == 20


def test_completions_and_models(client: openai.OpenAI, served: Engine) -> None:
    text = served.generate("abc", max_tokens=9).text
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=9, logprobs=2)
    assert answer.choices[0].text == text
    assert len(answer.choices[0].logprobs.token_logprobs) == 9
    stream = client.completions.create(model="tiny", prompt="abc", max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_parsed_form(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        age: int = Field(ge=10, le=99)

    answer = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Person, max_tokens=60
    )
    assert 10 <= answer.choices[0].message.parsed.age <= 99


def test_a_call_of_a_tool(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "light", "parameters": parameters}}
    asked = {"model": "tiny", "messages": HELLO, "tools": [tool], "max_tokens": 60}
    answer = client.chat.completions.create(**asked, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "light"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    messages = [
        *HELLO,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    again = client.chat.completions.create(**{**asked, "messages": messages}, tool_choice="none")
    assert again.choices[0].message.tool_calls is None


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI, url: str) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'") as missing:
        ask(model="gpt", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="tiny", messages=HELLO, max_tokens=-3)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as full:
        ask(model="tiny", messages=[{"role": "user", "content": "a" * 3000}])
    assert full.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
