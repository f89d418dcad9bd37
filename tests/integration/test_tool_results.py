"""Results of tool calls reach the model in the order of the calls, in every API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.errors import UsageError
from fixtures.echo_model import open_echo
from fixtures.server_requests import client_of

# The model answers with the whole prompt.
CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
TEMPLATE = "u:{% for m in messages %}{{ m.content or '' }}@calls;{% endfor %}<eos>a:"
TEMPLATES = {
    "knows calls": "{{ tools | tojson if tools }}" + TEMPLATE.replace("@calls", CALLS),
    "knows none": TEMPLATE.replace("@calls", ""),
}
CITIES = {"c0": "Oslo", "c1": "Rome", "c2": "Lima"}
USER = {"role": "user", "content": "Where is it warm?"}
CALLED: list[dict[str, Any]] = [
    {"id": id, "type": "function", "function": {"name": f"in_{id}", "arguments": {"city": city}}}
    for id, city in CITIES.items()
]
Result = tuple[str | None, str]  # the id, or the name, of its call, and what it says


@pytest.fixture(scope="module", params=TEMPLATES)
def echo(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_echo(template=TEMPLATES[request.param]) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(echo: Engine) -> Iterator[httpx.Client]:
    with client_of(echo) as opened:
        yield opened


def messages(results: list[Result], key: str, *, has_ids: bool = True) -> list[dict[str, Any]]:
    calls = [call if has_ids else {**call, "id": None} for call in CALLED]
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", key: id, "content": text} for id, text in results),
    ]


def answered(response: httpx.Response) -> Any:
    if response.status_code != 200:
        assert response.status_code == 400
        error = response.json()["error"]
        raise UsageError(error if isinstance(error, str) else error["message"], remedy="")
    return response.json()


def sdk(engine: Engine, client: httpx.Client, results: list[Result]) -> str:
    return engine.chat(messages(results, "tool_call_id"), max_tokens=2000).text


def chat(engine: Engine, client: httpx.Client, results: list[Result]) -> str:
    body = {"messages": messages(results, "tool_call_id"), "max_tokens": 2000}
    told = answered(client.post("/v1/chat/completions", json=body))
    return str(told["choices"][0]["message"]["content"])


def ollama(engine: Engine, client: httpx.Client, results: list[Result]) -> str:
    body = {"messages": messages(results, "tool_call_id"), "stream": False}
    options = {"num_predict": 2000}
    told = answered(client.post("/api/chat", json={"model": "echo", "options": options, **body}))
    return str(told["message"]["content"])


def anthropic(engine: Engine, client: httpx.Client, results: list[Result]) -> str:
    uses = [
        {"type": "tool_use", "id": call["id"], "name": "f", "input": call["function"]["arguments"]}
        for call in CALLED
    ]
    told = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
    spoken = [{"role": "assistant", "content": uses}, {"role": "user", "content": told}]
    body = {"model": "echo", "max_tokens": 2000, "messages": [USER, *spoken]}
    return str(answered(client.post("/v1/messages", json=body))["content"][0]["text"])


def responses(engine: Engine, client: httpx.Client, results: list[Result]) -> str:
    calls = [
        {"type": "function_call", "call_id": call["id"], "name": "f", "arguments": "{}"}
        for call in CALLED
    ]
    told = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]
    body = {"model": "echo", "max_output_tokens": 2000, "input": [USER, *calls, *told]}
    answer = answered(client.post("/v1/responses", json=body))
    return str(answer["output"][0]["content"][0]["text"])


APIS = [sdk, chat, ollama, anthropic, responses]
Ask = Callable[[Engine, httpx.Client, list[Result]], str]


@pytest.mark.parametrize("ask", APIS)
@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ("c0 c1 c2", "r0 r1 r2"),
        ("c2 c0 c1", "r1 r2 r0"),
        ("c2 c0", "r1 none r0"),
        ("c1", "none r0 none"),
        ("c1 c0 c1 c2", "r1 r0 r2 r3"),
        ("c0 cX c1 c2", "the id 'cX'"),
        ("c0 c1 c2 cX", "the id 'cX'"),
    ],
)
def test_each_call_gets_its_result(
    echo: Engine, client: httpx.Client, ask: Ask, results: str, expected: str
) -> None:
    given: list[Result] = [(id, f"r{place}") for place, id in enumerate(results.split())]
    if "cX" in results:
        with pytest.raises(UsageError, match=expected) as caught:
            ask(echo, client, given)
        assert "\n" not in str(caught.value)
    else:
        assert order(ask(echo, client, given)) == expected


def order(prompt: str) -> str:
    found: list[str] = re.findall(r"\b(?:r\d|no result)\b", prompt)
    return " ".join(each.replace("no result", "none") for each in found)


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["in_c1", "in_c2", "in_c0"], "r2 r0 r1"),
        ([None, None, None], "r0 r1 r2"),
        ([None, "in_c0"], "r1 r0 none"),
        (["other", "in_c2"], "r0 none r1"),
        ([None, None, None, None], "r0 r1 r2 r3"),
    ],
)
def test_results_without_ids_go_by_name_and_then_by_place(
    echo: Engine, client: httpx.Client, names: list[str | None], expected: str, has_ids: bool
) -> None:
    given: list[Result] = [(name, f"r{place}") for place, name in enumerate(names)]
    told = messages(given, "tool_name", has_ids=has_ids)
    body = {"model": "echo", "messages": told, "stream": False, "options": {"num_predict": 2000}}
    answer = answered(client.post("/api/chat", json=body))["message"]["content"]
    assert order(answer) == expected
    named = [{"name" if key == "tool_name" else key: v for key, v in m.items()} for m in told]
    assert order(echo.chat(named, max_tokens=2000).text) == expected


def test_results_stay_with_their_own_message_of_calls(echo: Engine) -> None:
    turn = messages([("c1", "r1"), ("c0", "r0"), ("c2", "r2")], "tool_call_id")
    again = messages([("c2", "r5"), ("c1", "r4"), ("c0", "r3")], "tool_call_id")
    late = {"role": "tool", "tool_call_id": "d", "content": "r7"}
    one = {**turn[1], "tool_calls": [{**CALLED[0], "id": "d"}]}
    said = {"role": "user", "content": "r8"}
    text = echo.chat([*turn, *again, one, said, late, USER], max_tokens=4000).text
    assert order(text) == "r0 r1 r2 r3 r4 r5 r7 r8"
    assert order(echo.chat([*turn[:2], USER], max_tokens=2000).text) == "none none none"
    assert order(echo.chat(turn[:2], max_tokens=2000).text) == ""


def test_a_result_without_calls_before_it(echo: Engine) -> None:
    result = {"role": "tool", "content": "r0"}
    assert order(echo.chat([USER, result], max_tokens=2000).text) == "r0"
    with pytest.raises(UsageError, match="the id 'c0'"):
        echo.chat([USER, {**result, "tool_call_id": "c0"}])
