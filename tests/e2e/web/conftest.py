"""A real browser before a real server, whose model says what a test wants it to say."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.cli.options import SamplingOptions
from fixtures import echo_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

FLAGS = (
    "--headless",
    "--disable-smooth-scrolling",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Chat:
    """The page as somebody uses it who talks to the model."""

    def __init__(self, page: Page, forever: str) -> None:
        self.page = page
        self._forever = forever

    def send(self, text: str) -> None:
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")

    def ask(self, text: str) -> None:
        """Sends a message and waits until it is answered, with the same text."""
        self.send(text)
        self.settle()

    def ask_forever(self, text: str) -> None:
        """Has `text` written without end, and returns when it is there a few times."""
        self.send(self._forever + text)
        self.until(
            f"document.querySelector('.running')?.textContent.split({text.strip()!r}).length > 4"
        )

    def settle(self) -> None:
        """Waits until no answer is written."""
        self.until("document.getElementById('stop').hidden && !document.querySelector('.running')")

    def answer_again(self) -> None:
        self.answer.get_by_label("Answer again").click()
        self.settle()

    def edit(self, index: int, text: str) -> None:
        """Another text for one of the messages."""
        question = self.page.locator(".question").nth(index)
        question.hover()
        question.get_by_label("Edit").click()
        self.page.fill(".edit textarea", text)
        self.page.press(".edit textarea", "Enter")
        self.settle()

    @property
    def answer(self) -> Locator:
        """The last one."""
        return self.page.locator(".answer").last

    @property
    def text(self) -> str:
        """Of the last answer, as it is shown."""
        return self.answer.locator(".prose, .tokens").inner_text()

    @property
    def titles(self) -> Locator:
        """Of the conversations in the list."""
        return self.page.locator("#conversations .open")

    def set(self, **values: str) -> None:
        """Fills fields of the settings, by their names."""
        self.page.click("#show-settings")
        for name, value in values.items():
            self.page.fill(f"[name={name}]", value)
        self.page.keyboard.press("Escape")

    def until(self, condition: str) -> None:
        """Waits for a JavaScript condition; the page's policy forbids wait_for_function."""
        wait = "if (performance.now() > end) throw Error('in vain'); await frame();"
        code = f"const end = performance.now() + 60000; while (!({condition})) {{ {wait} }}"
        frame = "const frame = () => new Promise(requestAnimationFrame);"
        self.page.evaluate(f"async () => {{ {frame} {code} }}")


@pytest.fixture(scope="session")
def echo() -> ModuleType:
    """The module of the model that answers with the message's own text."""
    return echo_model


@pytest.fixture
def serve(echo: ModuleType) -> Iterator[Callable[..., RunningServer]]:
    """serve(context_length=100_000, template=..., **options): a server with one slot, for which
    none may wait."""
    with ExitStack() as opened:

        def start(
            context_length: int = 100_000, template: str = echo.TEMPLATE, **options: Any
        ) -> RunningServer:
            engine = opened.enter_context(echo.open_echo(context_length, template))
            settings = {"port": 0, "parallel": 1, "queue": 0} | options
            chosen = ServerOptions(sampling=SamplingOptions(100_000), grace_s=0.0, **settings)
            return opened.enter_context(RunningServer(engine, chosen))

        yield start


@pytest.fixture(scope="module")  # playwright's event loop would be in the way of other tests'
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    api.expect.set_options(timeout=60_000)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def open_chat(browser: Browser, echo: ModuleType) -> Iterator[Callable[..., Chat]]:
    """open_chat(url, loaded=True, **context): the page in a browser context of its own.

    In the end the pages must have asked their own servers only, and nothing may have failed in
    them, opened a dialog or a window, or been refused by their policy.
    """
    asked: set[str] = set()
    own: set[str] = set()
    wrong: list[str] = []

    def watch(page: Page) -> None:
        page.on("request", lambda request: asked.add(re.match(r"\w+:(//[^/]+)?", request.url)[0]))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("popup", lambda popup: wrong.append(popup.url))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda told: "Policy" in told.text and wrong.append(told.text))

    with ExitStack() as opened:

        def start(url: str, *, loaded: bool = True, **settings: Any) -> Chat:
            context = browser.new_context(**settings)
            opened.callback(context.close)
            context.set_default_timeout(60_000)
            page = context.new_page()
            watch(page)
            page.goto(url)
            own.add(page.evaluate("location.origin"))
            chat = Chat(page, echo.FOREVER)
            if loaded:
                chat.until("document.getElementById('model').textContent")
            return chat

        yield start
    assert wrong == []
    assert asked <= own


@pytest.fixture
def chat(serve: Callable[..., RunningServer], open_chat: Callable[..., Chat]) -> Chat:
    return open_chat(serve().url)


@pytest.fixture
def page(chat: Chat) -> Page:
    return chat.page
