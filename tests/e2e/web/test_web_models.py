"""The choice among several models of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.cli.options import SamplingOptions
from edge_spec.errors import ModelFileError
from edge_spec.loader import ModelOnDemand

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


@pytest.fixture
def serve_models(echo: ModuleType) -> Iterator[Callable[..., RunningServer]]:
    """serve_models(**contexts): models by name, with so many tokens of context; 0: damaged."""

    def open_model(context_length: int, **_: Any) -> Engine:
        if not context_length:
            raise ModelFileError("its file is damaged", remedy="Fetch it again.")
        engine: Engine = echo.open_echo(context_length)
        return engine

    with ExitStack() as opened:

        def start(**contexts: int) -> RunningServer:
            models = [
                ModelOnDemand(name, partial(open_model, context))
                for name, context in contexts.items()
            ]
            options = ServerOptions(
                port=0, parallel=1, sampling=SamplingOptions(max_tokens=100_000), grace_s=0.0
            )
            return opened.enter_context(RunningServer(models, options))

        yield start


def test_the_model_that_is_chosen_answers_and_stays_chosen(
    serve_models: Callable[..., RunningServer], open_chat: Callable[..., Any]
) -> None:
    chat = open_chat(serve_models(small=1000, large=2000).url)
    page, told = chat.page, chat.page.locator("#model")
    expect(told).to_contain_text("small on scripted, 1,000 tokens")
    page.get_by_label("Model").select_option("large")
    expect(told).to_contain_text("large on scripted, 2,000 tokens")
    with page.expect_request("**/v1/chat/completions") as asked:
        chat.ask("hello")
    assert asked.value.post_data_json["model"] == "large"
    assert chat.text == "hello"
    page.reload()
    expect(told).to_contain_text("large on scripted")
    expect(page.get_by_label("Model")).to_have_value("large")


def test_a_model_that_cannot_be_opened_is_said_and_another_one_answers(
    serve_models: Callable[..., RunningServer], open_chat: Callable[..., Any]
) -> None:
    chat = open_chat(serve_models(small=1000, bad=0).url)
    page = chat.page
    page.get_by_label("Model").select_option("bad")
    expect(page.locator("#notice")).to_contain_text("its file is damaged")
    expect(page.locator("#model")).to_contain_text("bad is not open")
    page.get_by_label("Model").select_option("small")
    expect(page.locator("#notice")).not_to_be_visible()
    chat.ask("hello")
    assert chat.text == "hello"
