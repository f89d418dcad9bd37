"""Where a template opens a thought, an answer of a form begins after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_spec import Engine, Grammar
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.schema import ChatRequest
from edge_spec.apps.server.work import Desk
from edge_spec.text.chat_format import ChatFormat
from fixtures.echo_model import EOS, byte_tokenizer, open_echo

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
)
CHOSEN = "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELLO = [{"role": "user", "content": "Hi <think>\n"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat_format(opening: str) -> ChatFormat:
    return ChatFormat(byte_tokenizer(), f"{TURNS}{opening}{{% endif %}}", (EOS,), None)


@pytest.mark.parametrize(
    ("opening", "closed"),
    [
        ("<think>\n", "<think>\n\n</think>\n\n"),
        ("<think>", "<think>\n\n</think>\n\n"),
        ("<think>\n\n", "<think>\n\n</think>\n\n"),
        ("<seed:think>\n", "<seed:think>\n\n</seed:think>\n\n"),
        ("[THINK]", "[THINK]\n\n[/THINK]\n\n"),
        ("<|START_THINKING|>", "<|START_THINKING|>\n\n<|END_THINKING|>\n\n"),
        (CHOSEN, "<think></think>"),  # as the template itself writes it
        ("<think></think>\n", "<think></think>\n"),
        ("So <thinks>", "So <thinks>"),
        ("", ""),
    ],
)
def test_a_thought_is_closed_that_the_template_opens(opening: str, closed: str) -> None:
    text = chat_format(opening).rendered(HELLO, closes_thought=True)
    assert text == f"<user>Hi <think>\n<eos><assistant>{closed}"
    plain = chat_format(opening).rendered(HELLO)
    assert plain.startswith("<user>Hi <think>\n<eos><assistant>")
    assert plain.endswith("<think>\n") if opening == CHOSEN else plain.endswith(opening)


@pytest.fixture
def engine() -> Engine:
    opened = open_echo()
    return Engine(replace(opened.parts, text=chat_format("<think>\n")))


@pytest.mark.parametrize(
    ("asked", "is_closed"),
    [
        ({}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, True),
        ({"guided_regex": "yes|no"}, True),
        ({"guided_regex": "(?s:.*)</think>yes"}, False),
    ],
)
def test_a_request_whose_answer_has_a_form(engine: Engine, asked: Any, is_closed: bool) -> None:
    request = ChatRequest.model_validate({"messages": HELLO, **asked})
    work = Desk("echo", engine, ServerOptions()).chat(request)
    prompt = engine.parts.text.tokenizer.decode(work.prompts[0])
    assert prompt.endswith("<think>\n\n</think>\n\n" if is_closed else "<assistant><think>\n")


@pytest.mark.parametrize(
    ("options", "is_closed"),
    [
        ({}, False),
        ({"grammar": Grammar.json_schema(SCHEMA)}, True),
        ({"grammar": Grammar.regex("yes|no")}, True),
        ({"grammar": Grammar.regex("(?s:.*)</think>yes")}, False),
        ({"grammar": Grammar.regex("yes|no"), "closes_thought": False}, False),
        ({"closes_thought": True}, True),
    ],
)
def test_an_answer_of_the_sdk(engine: Engine, options: Any, is_closed: bool) -> None:
    result = engine.chat(HELLO, max_tokens=1, **options)
    plain, closed = (engine.chat_prompt(HELLO, closes_thought=each) for each in (False, True))
    assert len(plain) < len(closed)
    assert result.stats.prompt_n == len(closed if is_closed else plain)
