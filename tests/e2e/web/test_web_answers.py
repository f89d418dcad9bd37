"""What the page sends, and how it shows what comes back."""

from __future__ import annotations

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


def test_an_answer_is_shown_as_markdown_with_its_figures(chat: Any, page: Page) -> None:
    chat.ask("# Title\n\nSome **bold** text.\n\n- one\n- two")
    answer = chat.answer
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    length = len("# Title\n\nSome **bold** text.\n\n- one\n- two") + 1
    assert re.search(rf"tokens/s · .*{length} tokens", answer.locator(".stats").inner_text())
    assert page.locator("#title").inner_text() == "# Title"


def test_a_running_answer_is_stopped_and_its_slot_is_free_again(
    serve: Serve, open_chat: Open
) -> None:
    chat = open_chat(serve(queue=1).url)  # the slot is free soon after the page says so
    page = chat.page
    chat.ask_forever("on and on. ")
    expect(chat.answer).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(chat.answer).to_contain_text("It was stopped here.")
    chat.ask("next")  # would wait for ever: there is one slot
    assert chat.text == "next"


def test_the_stop_button_stops(chat: Any, page: Page) -> None:
    chat.ask_forever("on ")
    page.click("#stop")
    expect(chat.answer).to_contain_text("It was stopped here.")


def test_what_came_before_goes_along_with_a_message(chat: Any, page: Page) -> None:
    chat.ask("first")
    with page.expect_request("**/v1/chat/completions") as asked:
        chat.ask("second")
    roles = [(each["role"], each["content"]) for each in asked.value.post_data_json["messages"]]
    assert roles == [("user", "first"), ("assistant", "first"), ("user", "second")]


def test_speculation_is_chosen_and_its_tokens_are_marked(chat: Any, page: Page) -> None:
    repeated = "the same words and " * 12
    page.select_option("#drafter", "suffix")
    chat.ask(repeated)
    page.click("#show-tokens")
    answer = chat.answer
    assert chat.text == repeated
    assert answer.locator(".tokens .accepted").count() > 50
    assert "accepted by suffix" in answer.locator(".legend").inner_text()
    page.select_option("#drafter", "none")
    chat.answer_again()
    assert answer.locator(".legend").inner_text() == f"plain {len(repeated) + 1}"
    assert "speculation off" in answer.locator(".stats").inner_text()
    page.click("#show-tokens")
    assert chat.text.startswith("the same words")


def test_answering_again_keeps_the_earlier_answer(chat: Any, page: Page) -> None:
    chat.ask("hello")
    chat.set(max_tokens="2")
    answer = chat.answer
    chat.answer_again()
    assert chat.text == "he"
    assert "2 of 2" in answer.locator(".versions").inner_text()
    answer.get_by_label("Earlier answer").click()
    assert chat.text == "hello"
    expect(answer.get_by_label("Later answer")).to_be_focused()


def test_an_edited_message_replaces_what_followed(chat: Any, page: Page) -> None:
    chat.ask("first")
    chat.ask("second")
    chat.edit(0, "changed")
    assert page.locator(".question").all_inner_texts() == ["changed"]
    assert chat.text == "changed"


def test_answers_of_two_conversations_do_not_mix(serve: Serve, open_chat: Open) -> None:
    chat = open_chat(serve(parallel=2).url)
    page = chat.page
    chat.ask_forever("one ")
    page.keyboard.press("Control+k")
    chat.ask("two")
    assert chat.text == "two"
    assert "(answering)" in page.locator("#conversations li", has_text="one").inner_text()
    page.locator("#conversations .open", has_text="one").click()
    expect(page.locator("#stop")).to_be_visible()
    page.click("#stop")
    assert "two" not in chat.text
