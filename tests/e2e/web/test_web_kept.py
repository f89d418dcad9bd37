"""What the page keeps in the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from edge_spec.apps.server import RunningServer

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., Any]
Serve = Callable[..., RunningServer]


def test_conversations_survive_a_reload(chat: Any, page: Page) -> None:
    chat.ask("first topic")
    page.keyboard.press("Control+k")
    chat.ask("second topic")
    page.reload()
    entries = page.locator("#conversations .open")
    expect(entries).to_have_text(["second topic", "first topic"])
    assert chat.text == "second topic"
    entries.nth(1).click()
    assert chat.text == "first topic"
    assert "tokens/s" in chat.answer.locator(".stats").inner_text()


def test_an_answer_that_a_reload_cuts_is_kept_so_far(chat: Any, page: Page) -> None:
    chat.ask_forever("on ")
    page.reload()
    expect(chat.answer).to_contain_text("on on")
    expect(chat.answer).to_contain_text("It was stopped here.")


def test_damaged_and_hostile_storage_is_passed_over(chat: Any, page: Page) -> None:
    chat.ask("good")
    hostile = {
        "id": "h",
        "title": {"a": 1},
        "messages": [
            {"role": "user", "text": "<img src=x onerror=alert(1)>"},
            {
                "role": "assistant",
                "chosen": 7,
                "answers": [{"text": "kept", "marks": [1, 9], "kinds": [3], "samples": "x"}],
            },
        ],
    }
    values = ["{", "null", "[]", '{"id":"d","messages":[{"role":"user"}]}', json.dumps(hostile)]
    for name, value in zip("abcdh", values, strict=True):
        page.evaluate(
            "([name, value]) => localStorage.setItem(name, value)",
            [f"edge-spec.conversation.{name}", value],
        )
    page.evaluate("localStorage.setItem('edge-spec.settings', '{\"system\": 3}')")
    page.reload()
    expect(chat.titles).to_have_text(["good", "New chat"])
    page.locator("#conversations .open").nth(1).click()
    assert chat.text == "kept"
    chat.ask("more")


def test_full_storage_is_said_and_the_conversation_goes_on(chat: Any, page: Page) -> None:
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 200))")
    chat.ask("hello " * 40)
    assert "storage is full" in page.locator("#notice").inner_text()
    chat.ask("more")
    assert chat.text == "more"
