"""What the page says where an answer cannot be had, and what can be done then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edge_spec.apps.server import RunningServer, ServerOptions

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

Open = Callable[..., Any]
Serve = Callable[..., RunningServer]
KEY = "correct horse"


def test_a_wrong_key_is_asked_for_again(serve: Serve, open_chat: Open) -> None:
    chat = open_chat(serve(api_key=KEY).url, loaded=False)
    page = chat.page
    expect(page.locator("#key")).to_be_visible()
    with page.expect_response("**/edge-spec/info") as answered:
        page.fill("#key input", "wrong")
        page.keyboard.press("Enter")
    assert answered.value.status == 401
    expect(page.locator("#key")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Enter it").click()
    page.fill("#key input", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("echo")
    chat.ask("hello")
    page.reload()  # the tab keeps the key
    expect(page.locator("#model")).to_contain_text("echo")
    expect(page.locator("#key")).not_to_be_visible()


def test_a_key_in_the_address_is_taken_out_of_it(serve: Serve, open_chat: Open) -> None:
    running = serve(api_key=KEY)
    chat = open_chat(f"{running.url}/#key={KEY.replace(' ', '%20')}")
    assert chat.page.url == f"{running.url}/"
    chat.ask("hello")
    assert KEY not in chat.page.evaluate("JSON.stringify(localStorage)")


def test_a_server_that_is_gone_is_said_and_tried_again(echo: Any, open_chat: Open) -> None:
    with echo.open_echo() as engine:
        with RunningServer(engine, ServerOptions(port=0, parallel=1, grace_s=0.0)) as first:
            port = first.port
            chat = open_chat(first.url)
        chat.send("hello")
        expect(chat.answer).to_contain_text("The server does not answer.")
        with RunningServer(engine, ServerOptions(port=port, parallel=1, grace_s=0.0)):
            chat.answer.get_by_role("button", name="Try again").click()
            expect(chat.answer.locator(".prose")).to_have_text("hello")
            chat.settle()
            assert chat.page.locator(".error").count() == 0


def test_a_stream_that_breaks_off_is_said_and_its_text_stays(chat: Any) -> None:
    event = 'data: {"choices": [{"delta": {"content": "so far"}}]}\n\n'
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=event))
    chat.ask("hello")
    expect(chat.answer.locator(".error")).to_contain_text("The connection ended before")
    assert chat.text == "so far"
