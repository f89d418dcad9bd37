"""Members of requests that a chat template reads reach it, and no other is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge_spec import Engine
from edge_spec.apps.server import ServerOptions
from edge_spec.apps.server.schema import ChatRequest
from edge_spec.apps.server.work import Desk
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from fixtures import tiny_models
from fixtures.server_requests import CHAT, HELLO, post, refusal, text

READS = "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"
READS += "{% if documents %}{{ documents | tojson }}{% endif %}{{ reasoning_effort or '' }}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model whose chat template has switches."""
    path = tmp_path_factory.mktemp("thinker") / "tiny"
    tiny_models.write_hf(tiny_models.build("llama", max_position_embeddings=1024), path)
    template = tiny_models.TEMPLATE + "{% if add_generation_prompt %}>{% endif %}" + READS
    tiny_models.write_json(path / "tokenizer_config.json", {"chat_template": template})
    options = LoadOptions(runtime="reference", context_length=1024)
    with load_engine(str(path), options, lambda what, fraction: None) as engine:
        yield engine


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"think": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
        ({"chat_template_kwargs": {}}, {}),
    ],
    ids=json.dumps,
)
def test_the_chat_template_is_given_what_it_reads(
    thinker: Engine, body: dict[str, Any], options: dict[str, Any]
) -> None:
    request = ChatRequest.model_validate({"messages": HELLO, **body})
    work = Desk("tiny", thinker, ServerOptions()).chat(request)
    assert work.prompts[0] == thinker.chat_prompt(HELLO, template_kwargs=options)
    assert bool(options) == (work.prompts[0] != thinker.chat_prompt(HELLO))


@pytest.mark.parametrize(
    ("body", "added"),
    [
        ({"continue_final_message": True}, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, False),
        ({"prefix": True}, False),
        ({"partial": True}, False),
        ({}, True),
    ],
    ids=json.dumps,
)
def test_an_answer_goes_on_with_the_last_message(
    thinker: Engine, body: dict[str, Any], added: bool
) -> None:
    last = {"role": "assistant", "content": "so"}
    mark = {name: body.pop(name) for name in ("prefix", "partial") if name in body}
    request = ChatRequest.model_validate({"messages": [*HELLO, {**last, **mark}], **body})
    work = Desk("tiny", thinker, ServerOptions()).chat(request)
    prompt = thinker.parts.text.tokenizer.decode(work.prompts[0])
    assert prompt.endswith(">") if added else prompt.endswith("so")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"chat_template_kwargs": {"enable_thinkng": True}}, "chat_template_kwargs gives"),
        ({"documents": [{"text": "a"}]}, "documents gives this model's chat template"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    client: httpx.Client, body: dict[str, Any], told: str
) -> None:
    assert told in refusal(post(client, CHAT, **body))


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"enable_thinking": True},
        {"thinking": {"type": "enabled", "budget_tokens": 100}},
        {"reasoning_budget": 0},
        {"reasoning": {"max_tokens": 100, "exclude": True}},
        {"reasoning_format": "none"},
        {"include_reasoning": False, "separate_reasoning": False},
    ],
)
def test_what_is_said_of_thoughts_is_taken_where_there_are_none(
    client: httpx.Client, body: dict[str, Any]
) -> None:
    assert text(client, CHAT, **body) == text(client, CHAT)
