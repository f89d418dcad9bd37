"""Thoughts and calls of tools on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from edge_spec.apps.server import RunningServer

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., Any]
Serve = Callable[..., RunningServer]
ASKED = "**/v1/chat/completions"
THOUGHT = "I wonder about *this*.\n\nAnd that."
ANSWER = f"<think>{THOUGHT}</think>It is **so**."
CALL = {"name": "weather", "arguments": '{"city": "Bern", "unit": "<b>"}'}


@pytest.fixture
def chat(serve: Serve, open_chat: Open, echo: Any) -> Any:
    """With a model that thinks where it is told what to."""
    return open_chat(serve(template=echo.THINKING_TEMPLATE).url)


def messages_of(chat: Any, text: str) -> list[dict[str, Any]]:
    """What is sent with one more message."""
    with chat.page.expect_request(ASKED) as asked:
        chat.send(text)
    return asked.value.post_data_json["messages"]


def test_a_thought_is_folded_and_opened_by_the_keyboard(chat: Any, page: Page) -> None:
    chat.ask(ANSWER)
    summary = chat.answer.locator(".thought summary")
    tokens = len(ANSWER.partition("It is")[0])
    assert re.fullmatch(rf"Thought for \d+\.\d s \({tokens} tokens\)", summary.inner_text())
    thought = chat.answer.locator(".thought .prose")
    expect(thought).to_be_hidden()
    assert chat.answer.locator("strong").inner_text() == "so"
    summary.press("Enter")
    expect(thought.locator("em")).to_have_text("this")
    expect(thought.locator("p").last).to_have_text("And that.")
    page.click("#show-tokens")
    chat.answer.locator(".thought summary").click()
    assert (
        chat.answer.locator(".thought .tokens").inner_text()
        == "I wonder about *this*.\n\nAnd that."
    )
    page.reload()
    expect(chat.answer.locator(".thought")).not_to_have_attribute("open", "")
    sent = messages_of(chat, "and then?")
    assert sent[1] == {
        "role": "assistant",
        "content": "It is **so**.",
        "reasoning_content": THOUGHT,
    }
    chat.settle()
    assert chat.answer.locator(".thought").count() == 0


def test_a_call_is_shown_as_one_and_sent_back_with_a_result(serve: Serve, open_chat: Open) -> None:
    chat = open_chat(serve().url, viewport={"width": 360, "height": 700})
    page = chat.page
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"reasoning_content": "The weather."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": CALL["name"]}}]},
        *(
            {"tool_calls": [{"index": 0, "function": {"arguments": each}}]}
            for each in CALL["arguments"]
        ),
    ]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    events = "".join(f"data: {json.dumps({'choices': [each]})}\n\n" for each in choices)
    page.route(ASKED, lambda route: route.fulfill(content_type="text/event-stream", body=events))
    chat.ask("How is it in Bern?")
    call = chat.answer.locator("figure.call")
    expect(call.locator("figcaption span")).to_have_text("Call of weather")
    expect(call.locator("pre")).to_have_text('{\n  "city": "Bern",\n  "unit": "<b>"\n}')
    page.reload()
    sent = messages_of(chat, "and then?")
    assert sent[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": CALL}]
    assert (sent[1]["content"], sent[1]["reasoning_content"]) == ("I look.", "The weather.")
    assert (sent[2]["role"], sent[2]["tool_call_id"]) == ("tool", "c1")
    chat.settle()
