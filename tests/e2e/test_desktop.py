"""The window, on a virtual display: what it shows, what it keeps to itself, how it ends."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from edge_spec.storage.atomic import CACHE_VARIABLE, cache_directory

pytestmark = pytest.mark.model

MISSING = [tool for tool in ("Xvfb", "xdotool") if shutil.which(tool) is None]
MISSING += [module for module in ("webview", "PySide6", "PIL") if find_spec(module) is None]
shown = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")

KEY = "the-key-of-this-test"
# The key is known to the test; all else is as `edge-spec desktop` does it.
MAIN = f"""
import secrets, sys
from edge_spec.cli.start import main
secrets.token_urlsafe = lambda num_bytes: {KEY!r}
sys.argv[0] = "edge-spec"
main()
"""
OPENING = """
import webview
from threading import Event
from edge_spec.apps.desktop import run

def open_engine():
    webview.windows[0].events.loaded.wait()
    print("loaded", flush=True)
    Event().wait()

run(open_engine, print, title="nothing")
"""
LINKED = """
import edge_spec, webview
from threading import Event, Thread
from edge_spec.apps.desktop import run

def link():
    window = webview.windows[0]
    while not (window.get_current_url() or "").startswith("http"):
        Event().wait(0.05)
    window.run_js('''
        const link = document.createElement("a");
        Object.assign(link, {href: "https://example.org/there", target: "_blank"});
        Object.assign(link.style, {position: "fixed", inset: 0, zIndex: 9});
        document.body.append(link);
    ''')
    print("linked", flush=True)

run(lambda: edge_spec.load("smollm2"), lambda *_: Thread(target=link).start(), title="")
"""


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    read, write = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write), "-screen", "0", "1200x900x24", "-nolisten", "tcp"],
        pass_fds=[write],
        stderr=subprocess.DEVNULL,
    )
    os.close(write)
    with os.fdopen(read) as told:
        number = told.readline().strip()
    yield f":{number}"
    server.terminate()
    server.wait()


Open = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def open_window(display: str, demo_gguf: Path, tmp_path: Path) -> Iterator[Open]:
    """Runs Python code in a process of its own that can show windows."""
    processes, watchdogs = [], []

    def begin(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "DISPLAY": display,
                    "HOME": str(home),
                    CACHE_VARIABLE: str(cache_directory()),  # that of the real home
                    # Its sandbox does not work as root nor in most containers.
                    "QTWEBENGINE_DISABLE_SANDBOX": "1",
                    **environment,
                },
            )
        )
        watchdogs.append(Timer(300.0, processes[-1].kill))  # ends whoever reads from it, too
        watchdogs[-1].start()
        return processes[-1]

    yield begin
    for watchdog in watchdogs:
        watchdog.cancel()
    for process in processes:
        process.kill()
        process.communicate()


def line_with(stream: Any, told: str) -> str:
    for line in stream:
        if told in line:
            return line
    raise AssertionError(f"it ended before it said {told!r}")


def eventually(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
    ends_at = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < ends_at, what
        Event().wait(0.05)
    return found


def xdotool(display: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["xdotool", *arguments],
        env={**os.environ, "DISPLAY": display},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def window_named(display: str, name: str) -> int:
    found = eventually(
        lambda: xdotool(display, "search", "--onlyvisible", "--name", f"^{name}$"), "no window"
    )
    return int(found[0])


class ClientMessage(ctypes.Structure):
    """Xlib's XClientMessageEvent, as large as any event is."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("serial", ctypes.c_ulong),
        ("send_event", ctypes.c_int),
        ("display", ctypes.c_void_p),
        ("window", ctypes.c_ulong),
        ("message_type", ctypes.c_ulong),
        ("format", ctypes.c_int),
        ("data", ctypes.c_long * 5),
        ("rest", ctypes.c_long * 12),
    )


def press_close(display: str, window: int) -> None:
    """What a window manager does when its close button is pressed; there is none here."""
    x11 = ctypes.CDLL("libX11.so.6")
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XInternAtom.restype = ctypes.c_ulong
    connection = ctypes.c_void_p(x11.XOpenDisplay(display.encode()))
    protocols, delete = (
        x11.XInternAtom(connection, name, 0) for name in (b"WM_PROTOCOLS", b"WM_DELETE_WINDOW")
    )
    message = ClientMessage(
        type=33, window=window, message_type=protocols, format=32, data=(delete, 0, 0, 0, 0)
    )
    x11.XSendEvent(connection, ctypes.c_ulong(window), 0, ctypes.c_long(0), ctypes.byref(message))
    x11.XCloseDisplay(connection)


def close_window(process: subprocess.Popen[str], display: str, name: str) -> None:
    """Presses the close button until the process ends: a window that has just appeared may not
    listen yet, or Qt exchanges it for another one of its name, and a user would press again."""
    window_named(display, name)
    for _ in range(6):
        for window in xdotool(display, "search", "--onlyvisible", "--name", f"^{name}$"):
            press_close(display, int(window))
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    assert process.poll() == 0


def holding(text: str, paths: Iterable[Path]) -> list[Path]:
    """The files among them that hold a text."""
    found = []
    for path in paths:
        with suppress(OSError):  # a process that ended meanwhile
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


@shown
def test_the_window_shows_the_page_and_takes_everything_with_it(
    open_window: Open, display: str, tmp_path: Path
) -> None:
    import httpx
    from PIL import ImageGrab

    process = open_window(MAIN, "desktop", "smollm2")
    line = line_with(process.stderr, "in the window")
    url, port = re.search(r"(http://127\.0\.0\.1:(\d+))", line).groups()
    told = httpx.get(f"{url}/edge-spec/info", timeout=60)
    assert told.status_code == 401  # without the key
    headers = {"Authorization": f"Bearer {KEY}"}
    info = 'path="/edge-spec/info"'  # the page asked for it, with the key
    eventually(
        lambda: re.search(
            rf"requests_total{{{info},status=\"200\"}} [1-9]",
            httpx.get(f"{url}/metrics", headers=headers, timeout=60).text,
        ),
        "the page did not ask what the server is",
    )
    window = window_named(display, "edge-spec")
    blue = (29, 91, 191)  # of the button that sends: the page has its style
    eventually(
        lambda: any(
            max(abs(a - b) for a, b in zip(colour, blue, strict=True)) < 16
            for _, colour in ImageGrab.grab(xdisplay=display).getcolors(1 << 24)
        ),
        "the page is not drawn",
    )
    assert not holding(f"key={KEY}", Path("/proc").glob("[0-9]*/cmdline"))  # the code has KEY alone
    assert not holding(KEY, (tmp_path / "home").rglob("*"))
    press_close(display, window)
    assert process.wait(timeout=60) == 0
    with socket.socket() as free:
        assert free.connect_ex(("127.0.0.1", int(port))) != 0


@shown
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_closes_the_window(open_window: Open, number: int, status: int) -> None:
    import httpx

    first, second = (open_window(MAIN, "desktop", "smollm2") for _ in range(2))
    urls = [
        re.search(r"http\S+\d", line_with(each.stderr, "in the window"))[0]
        for each in (first, second)
    ]
    assert urls[0] != urls[1]
    with httpx.stream(
        "POST",
        f"{urls[0]}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Tell a story."}], "stream": True},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)  # in the middle of it
        for process in (first, second):
            process.send_signal(number)
        for process in (first, second):
            # Qt closes the window at SIGINT by itself.
            assert process.wait(timeout=60) in (0, -number)


@shown
def test_the_window_can_be_closed_while_the_model_is_opened(
    open_window: Open, display: str
) -> None:
    process = open_window(OPENING)
    line_with(process.stdout, "loaded")  # Qt forgets a close that comes before its loop begins
    close_window(process, display, "edge-spec")


@shown
def test_a_model_that_cannot_be_opened_closes_the_window(open_window: Open) -> None:
    process = open_window(MAIN, "desktop", "missing.gguf")
    assert process.wait(timeout=60) == 1
    last = process.stderr.read().splitlines()[-1]
    assert "missing.gguf" in last


@shown
def test_links_to_elsewhere_open_in_the_systems_browser(
    open_window: Open, display: str, tmp_path: Path
) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    process = open_window(LINKED, BROWSER=str(browser))
    line_with(process.stdout, "linked")

    def clicked() -> bool:  # the link may not be drawn yet
        xdotool(display, "mousemove", "600", "400", "click", "1")
        return opened.exists()

    eventually(clicked, "the link was not opened")
    assert opened.read_text() == "https://example.org/there\n"


def run_without(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    return subprocess.run(
        [*command, "desktop"],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_without_its_library_the_install_command_is_named(
    command: list[str], tmp_path: Path
) -> None:
    # A module of that name that cannot be imported stands for a missing package.
    (tmp_path / "webview.py").write_text("raise ImportError('not here')")
    done = run_without(command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert 'pip install -e ".[desktop]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


@shown
def test_without_a_display_the_browser_is_named(command: list[str]) -> None:
    done = run_without(command)
    assert done.returncode == 1
    assert "no display" in done.stderr and "edge-spec serve" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@shown
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root")
def test_root_is_told_before_the_browser_engine_ends_the_process(command: list[str]) -> None:
    done = run_without(command, DISPLAY=":0", QTWEBENGINE_DISABLE_SANDBOX="0")
    assert done.returncode == 1
    assert "root" in done.stderr
    assert len(done.stderr.splitlines()) == 1
