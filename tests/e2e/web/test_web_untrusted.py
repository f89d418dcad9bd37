"""Whatever a model writes is text: nothing of it runs, and nothing is fetched for it."""

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
# Texts that do something where a page takes them for HTML, or follows any address.
HOSTILE = [
    "<img src=https://evil.example/x onerror=alert(1)>",
    "<script>alert(1)</script><svg onload=alert(1)>",
    "[x](javascript:alert(1)) [y](JaVaScRiPt:alert(1)) [z](java&#10;script:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>) [y](vbscript:x) [z](//evil.example)",
    "![alt](https://evil.example/pixel.png) ![x](data:image/png;base64,AAAA)",
    "<https://evil.example/a> <iframe src=https://evil.example></iframe>",
    '`<b onclick="alert(1)">` **<i onmouseover=alert(1)>x</i>**',
    '```"onload=alert(1)\n</code></pre><script>alert(1)</script>\n```',
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| [x](javascript:alert(1)) | </td> |",
    "# <style>@import 'https://evil.example/x.css'</style>",
]


def test_nothing_in_an_answer_runs_or_is_loaded(chat: Any, page: Page) -> None:
    foreign = page.locator("#thread :is(img, script, iframe, style, b, i, svg[onload])")
    for text in HOSTILE:
        page.keyboard.press("Control+k")
        chat.ask(text)  # it is the message, the answer and the title
        assert foreign.count() == 0
        for link in page.locator("#thread a").all():
            assert re.match("https?:", link.get_attribute("href"))
            assert "noopener" in link.get_attribute("rel")
        page.click("#show-tokens")
        assert page.locator(".tokens").text_content() == text
        assert foreign.count() == 0
        page.click("#show-tokens")
    page.reload()
    expect(page.locator(".question .bubble")).to_have_text(HOSTILE[-1])
    assert foreign.count() == 0


def test_a_hostile_title_is_text(chat: Any, page: Page) -> None:
    chat.ask("hello")
    title = '"><img src=https://evil.example onerror=alert(1)>'
    page.locator("#conversations .open").focus()
    page.keyboard.press("F2")
    page.keyboard.type(title)
    page.keyboard.press("Enter")
    assert page.locator("#conversations .open").inner_text() == title
    assert page.locator("#title").inner_text() == title
    page.locator("#conversations").get_by_label("Delete").click()
    assert title in page.locator("#notice").inner_text()
    assert page.locator("#notice img, #conversations img").count() == 0
