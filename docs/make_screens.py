"""Makes the pictures of docs/images: the terminal, and the page that talks to the real server, both
with the demo model.

    python docs/make_screens.py

Needs `edge-spec[serve]` with its command on PATH, pyte, playwright for Python, Pillow and a
Chromium. Rates in the pictures are those of the machine that makes them.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import chat_screens

import edge_spec
from edge_spec.apps.server import RunningServer, ServerOptions

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parent / "images"
MAX_BYTES = 150_000
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FIRST = """Write a short list of three planets, each with one fact, then a Python function that \
adds two numbers, and use Markdown."""
AGAIN = "Say it again, the same planets and the same code."
IDLE = "document.getElementById('stop').hidden && !document.querySelector('.running')"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    options = ServerOptions(port=0, parallel=1)
    with TemporaryDirectory() as directory:
        chat_screens.main(Path(directory))
        in_browser(lambda browser: terminal_screens(browser, Path(directory)))
    with edge_spec.load() as engine, RunningServer(engine, options) as running:
        in_browser(lambda browser: screens(browser, running.url))


def in_browser(work: Callable[[Any], None]) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("make_screens: chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        work(browser)
        browser.close()


def terminal_screens(browser: Any, directory: Path) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.set_content((directory / "chat-tokens.svg").read_text(encoding="utf-8"))
    save("chat-tokens", page.locator("svg").screenshot())
    page.close()


def screens(browser: Any, url: str) -> None:
    context = browser.new_context(viewport={"width": 1240, "height": 780}, color_scheme="light")
    page = context.new_page()
    page.goto(url)
    until(page, "document.getElementById('model').textContent")
    ask(page, FIRST)
    ask(page, AGAIN)
    page.click("#show-speed")
    page.select_option("#drafter", "none")
    page.locator(".answer").last.get_by_label("Answer again").click()
    until(page, IDLE)
    shoot(page, "web-speed")
    page.locator(".answer").last.get_by_label("Earlier answer").click()
    page.click("#close-speed")
    page.click("#show-tokens")
    shoot(page, "web-tokens")
    page.click("#show-tokens")
    page.emulate_media(color_scheme="dark")
    shoot(page, "web-dark")
    page.emulate_media(color_scheme="light")
    page.locator("#question").focus()
    page.set_viewport_size({"width": 360, "height": 700})
    shoot(page, "web-narrow")


def ask(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")
    until(page, IDLE)


def until(page: Page, condition: str) -> None:
    """Waits for a JavaScript condition; the page's policy forbids wait_for_function."""
    code = f"while (!({condition})) await new Promise(requestAnimationFrame);"
    page.evaluate(f"async () => {{ {code} }}")


def shoot(page: Page, name: str) -> None:
    page.mouse.move(0, 0)  # nothing is hovered
    until(page, "!document.getAnimations().some((one) => one.playState === 'running')")
    save(name, page.screenshot())


def save(name: str, png: bytes) -> None:
    """Few colours are enough for a page of text, and a quarter of the bytes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    path = IMAGES / f"{name}.png"
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"make_screens: {path.name} has {size} bytes, more than {MAX_BYTES}")
    print(f"{path.name}: {size} bytes")


if __name__ == "__main__":
    main()
