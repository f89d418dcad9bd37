"""What the page sends, and how it shows what comes back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from edge_spec import SamplingParams
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


def test_settings_go_along_and_stay(chat: Any, page: Page) -> None:
    chat.set(system="Be brief.", max_tokens="3", temperature="-1")  # which is not valid
    page.reload()
    with page.expect_request("**/v1/chat/completions") as asked:
        chat.ask("first")
    body = asked.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["max_tokens"] == 3
    assert body["temperature"] == 0.7  # the server's word, not what is not valid
    expect(chat.answer).to_contain_text("It ends here because the limit")


SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def test_answers_are_drawn_as_the_makers_state_where_nothing_is_set(chat: Any, page: Page) -> None:
    def asked(text: str) -> dict[str, Any]:
        """What is sent of sampling."""
        with page.expect_request("**/v1/chat/completions") as request:
            chat.ask(text)
        body = request.value.post_data_json
        return {name: body[name] for name in SAMPLING if name in body}

    assert asked("first") == {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
    page.click("#show-settings")
    shown = "Where nothing is set: temperature 0.7, top-p 0.95, min-p 0.05 (edge-spec's defaults)."
    expect(page.locator("#makers")).to_have_text(shown)
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.7")
    page.keyboard.press("Escape")
    chat.set(top_p="0.5")
    assert asked("second") == {"temperature": 0.7, "top_p": 0.5, "min_p": 0.05}
    chat.set(temperature="0")
    assert asked("third") == {"temperature": 0, "top_p": 0.5}


def test_the_servers_own_options_hold_for_the_page(serve: Any, open_chat: Any) -> None:
    served = serve(sampling=SamplingParams(3.0), asked_sampling={"temperature": 3.0})
    chat = open_chat(served.url)
    with chat.page.expect_request("**/v1/chat/completions") as asked:
        chat.send("first")
    body = asked.value.post_data_json
    # More than a request may ask for, and what this one gets unasked.
    assert "temperature" not in body and body["min_p"] == 0.05
    chat.settle()


def test_a_question_may_be_asked_before_the_server_has_told_its_model(
    chat: Any, page: Page
) -> None:
    page.route("**/edge-spec/info", lambda route: None)  # its answer never comes
    page.reload()
    chat.ask("first")
    assert chat.text == "first"


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


def test_the_chart_shows_answers_with_speculation_and_without(chat: Any, page: Page) -> None:
    page.click("#show-speed")
    page.select_option("#drafter", "suffix")
    chat.ask("again and " * 30)
    page.select_option("#drafter", "none")
    chat.answer_again()
    chart = page.get_by_role("img", name=re.compile("answer 2, speculation off"))
    expect(chart.locator("g.on polyline")).to_have_count(1)
    expect(chart.locator("g.off polyline")).to_have_count(1)
    expect(page.locator("#rates tbody tr")).to_have_count(2)
    expect(page.locator("#rates")).to_contain_text("as fast with speculation")


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


def test_status_is_spoken_but_not_each_token(chat: Any, page: Page) -> None:
    assert page.locator("#thread[aria-live], #thread [aria-live], #thread [role=log]").count() == 0
    chat.ask("hello")
    expect(page.locator("#status")).to_contain_text("The answer is complete")
