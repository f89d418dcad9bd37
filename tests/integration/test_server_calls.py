"""Calls in forms of their own, in `/v1/chat/completions`: whole and streamed, drafted and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.template_traits import TemplateTraits
from edge_spec.text.tools.detection import ToolForm
from edge_spec.text.tools.harmony import HarmonyForm
from fixtures.call_templates import BARE, HARMONY, JSON, SPECIAL, TEMPLATES, echoing
from fixtures.echo_model import byte_tokenizer, open_echo
from fixtures.server_requests import CHAT, ask, client_of, events

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "names": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "look_up")
]
FULL = {"city": 'Lima\n"<b>" \u00e9', "days": 3, "names": ["a", "b c"]}


class Caller:
    """A model that answers with the message."""

    def __init__(self, client: httpx.Client, name: str, source: str) -> None:
        self.client = client
        self.name = name
        native = TemplateTraits(ChatTemplate(source).render).native_tools
        assert native is not None
        self.form: ToolForm = native.form

    def answer(self, text: str, **body: Any) -> dict[str, Any]:
        """The choice, which is the same streamed and not, drafted and not."""
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 900, **body}
        drafted = {**asked, "prediction": {"type": "content", "content": text}}
        whole = ask(self.client, CHAT, **asked)["choices"][0]
        assert _plain(ask(self.client, CHAT, **drafted)["choices"][0]) == _plain(whole)
        for each in (asked, drafted):
            told = [event["choices"][0] for event in events(self.client, CHAT, **each)]
            assert _plain(_joined(told)) == _plain(whole)
        return _plain(whole)


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return {
        "text": message.get("content") or "",
        "thought": message.get("reasoning_content") or "",
        "calls": [(each["name"], each["arguments"]) for each in calls],
        "reason": choice["finish_reason"],
    }


def _joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in told:
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({"function": dict(call["function"])})
            else:
                arguments = call["function"]["arguments"]
                message["tool_calls"][call["index"]]["function"]["arguments"] += arguments
    return {"message": message, "finish_reason": told[-1]["finish_reason"]}


SOURCES = {**TEMPLATES, "harmony": HARMONY}
SHORT = ("qwen3-coder", "gemma-4", "llama-4", "harmony", "mistral-v11", "deepseek-v3")
FORMS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in SOURCES]


@pytest.fixture(scope="module", params=FORMS)
def caller(request: pytest.FixtureRequest) -> Iterator[Caller]:
    """Tags of forms whose arguments are JSON are special tokens, which no text shows."""
    source = SOURCES[request.param]
    special = SPECIAL if request.param in JSON else ()
    tokenizer = byte_tokenizer(special)
    with (
        open_echo(
            template=echoing(source), tokenizer=tokenizer, parse_special=bool(special)
        ) as engine,
        client_of(engine) as client,
    ):
        yield Caller(client, request.param, source)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def test_calls_are_read_in_the_models_form(caller: Caller) -> None:
    calls, said = [call("weather", **FULL), call("look_up", city="")], "So it is.\n"
    if isinstance(caller.form, HarmonyForm) or caller.form.between is None:
        calls = calls[:1]  # an answer has one
    written = caller.form.written(calls)
    if isinstance(caller.form, HarmonyForm):
        said = "So it is."
        written = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant{written}"
    elif caller.name in BARE:
        said = ""
    else:
        written = said + written
    answer = caller.answer(written, tools=TOOLS)
    assert answer["text"] == said and answer["reason"] == "tool_calls"
    assert [(name, json.loads(given)) for name, given in answer["calls"]] == [
        (each["function"]["name"], each["function"]["arguments"]) for each in calls
    ]


def test_a_call_that_is_cut_off_is_none(caller: Caller) -> None:
    written = caller.form.written([call("weather", city="Lima in Peru")])
    begun = written[: written.index("Lima") + 4]
    length = len(ask(caller.client, "/tokenize", content=begun)["tokens"])
    answer = caller.answer(written, tools=TOOLS, max_tokens=length)
    assert (answer["text"], answer["reason"]) == ("", "length")


def test_a_required_call_is_written_whatever_the_model_would_say(caller: Caller) -> None:
    written = caller.form.written([call("look_up", city="Lima")])
    choice = {"type": "function", "function": {"name": "look_up"}}
    answer = caller.answer(written, tools=TOOLS, tool_choice=choice)
    assert answer["calls"] == [("look_up", '{"city": "Lima"}')]
    answer = caller.answer("I will not call.", tools=TOOLS, tool_choice="required", max_tokens=60)
    assert answer["text"] == ""
