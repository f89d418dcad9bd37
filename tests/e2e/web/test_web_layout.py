"""The page on narrow screens, by keyboard, in both colours; its tables and its scrolling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from edge_spec.apps.server import RunningServer
from edge_spec.engine.engine import Engine

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., Any]
Serve = Callable[..., RunningServer]
SCROLLER = "document.getElementById('scroller')"
FITS = (
    f"document.body.scrollWidth <= innerWidth && {SCROLLER}.scrollWidth <= {SCROLLER}.clientWidth"
)
PLAN = ("engine: <b>llamacpp</b> (it reads the file as it is)", f"drafter: {'suffix' * 60}")


def test_a_narrow_screen_has_no_horizontal_scroll(
    serve: Serve, open_chat: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "plan", property(lambda engine: PLAN))
    chat = open_chat(serve().url, viewport={"width": 360, "height": 700})
    page = chat.page
    table = f"|{'a wide cell|' * 9}\n|{'---|' * 9}\n|{'x|' * 9}"
    chat.ask(f"{'long' * 60}\n\n```\n{'code ' * 60}\n```\n\n{table}\n\n> {'quoted' * 30}")
    assert page.evaluate(FITS)
    page.click("#show-tokens")
    assert page.evaluate(FITS)
    for opener, dialog in (("#show-plan", "#plan"), ("#show-settings", "#settings")):
        page.click(opener)
        expect(page.locator(dialog)).to_be_visible()
        assert page.evaluate(FITS)
        if dialog == "#plan":
            expect(page.locator("#plan-content")).to_contain_text("<b>llamacpp</b> (it reads")
        page.keyboard.press("Escape")
    expect(page.locator("#conversations")).not_to_be_visible()
    page.click("#open-sidebar")
    expect(page.locator("#conversations .open")).to_be_in_viewport()
    assert page.evaluate(FITS)
    page.keyboard.press("Escape")
    expect(page.locator("#conversations")).not_to_be_visible()
    expect(page.locator("#open-sidebar")).to_be_focused()


def test_everything_is_done_by_keyboard(chat: Any, page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line")
    page.keyboard.press("Enter")
    chat.settle()
    assert page.locator(".question").inner_text() == "one\nline"
    page.keyboard.press("Control+k")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    chat.settle()
    page.keyboard.press("Shift+Tab")
    for _ in range(30):  # back through the page to the list
        if page.evaluate("document.activeElement.closest('#conversations') !== null"):
            break
        page.keyboard.press("Shift+Tab")
    page.locator("#conversations .open").first.press("ArrowDown")
    expect(page.locator("#conversations .open").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    assert page.locator("#title").inner_text() == "one"
    page.keyboard.press("F2")
    page.keyboard.type("named")
    page.keyboard.press("Enter")
    assert page.locator("#title").inner_text() == "named"
    expect(page.locator("#conversations .open", has_text="named")).to_be_focused()
    page.keyboard.press("Delete")
    expect(chat.titles).to_have_text(["two"])
    page.get_by_role("button", name="Undo").press("Enter")
    expect(chat.titles).to_have_count(2)
