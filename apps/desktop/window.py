"""A native window with a server of its own; both end together."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from threading import Event, Thread

import webview

from edge_spec import Engine
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.errors import DeviceError, MissingDependencyError, install

_BROWSER_INSTEAD = "Run edge-spec serve and open its address in a browser."
_CLOSING_S = 3.0  # longest wait for rounds in progress and for models after the window is closed
_OPENING = """<!doctype html><meta name="color-scheme" content="light dark"><title>edge-spec</title>
<body style="display: grid; place-content: center; height: 90vh; font: 1.1rem system-ui">
<p role="status">Opening {} …</p>"""


def run(
    open_engine: Callable[[], Engine],
    announce: Callable[[str, str, int], None],
    *,
    title: str,
    options: ServerOptions | None = None,
) -> None:
    """Show the window at once, load its page once the model is open, and return when it is closed.

    announce: called with the model's name, the server's address and its port. Signals end the
    process at once. Raises DeviceError if there is no display or none that a browser engine can
    use safely, MissingDependencyError if no browser engine is installed, and what `open_engine`
    raises.
    """
    _require_a_display()
    logging.getLogger("pywebview").setLevel(logging.CRITICAL)  # it logs at length what it raises
    key = secrets.token_urlsafe(32)
    window = _create_window(title)
    closed = Event()
    errors: list[Exception] = []  # raised by the calling thread

    def serve() -> None:
        with open_engine() as engine:
            own = replace(options or ServerOptions(), port=0, api_key=key, grace_s=0.0)
            if closed.is_set():
                return
            with RunningServer(engine, own) as server:
                announce(engine.name, server.url, server.port)
                # After "#", to keep the key out of requests, logs and process lists.
                window.load_url(f"{server.url}/#key={key}")
                closed.wait()

    def serve_unless_closed() -> None:
        try:
            if not closed.is_set():
                serve()
        except Exception as error:
            errors.append(error)
            window.destroy()

    # A daemon, so that a model still being opened does not outlive the process.
    behind = Thread(target=serve_unless_closed, name="edge-spec-window", daemon=True)
    _leave_signals_to_the_system()
    try:
        # PySide ends the process if other threads import while PySide itself is being imported.
        webview.start(
            behind.start,
            gui="qt" if sys.platform == "linux" and find_spec("qtpy") else None,
        )
    except webview.WebViewException as error:
        raise MissingDependencyError(
            f"no window can be opened: {str(error).rstrip('.')}",
            remedy=f"{install('desktop')}. Or: {_BROWSER_INSTEAD}",
        ) from error
    finally:
        closed.set()
        if behind.ident is not None:  # the window had opened
            behind.join(_CLOSING_S)
    if errors:
        raise errors[0]


def _create_window(title: str) -> webview.Window:
    window = webview.create_window(
        "edge-spec",
        html=_OPENING.format(escape(title)),
        width=1100,
        height=800,
        min_size=(360, 400),
        text_select=True,
        zoomable=True,
    )
    assert window is not None  # only a handler could refuse it, and there is none
    return window


def _leave_signals_to_the_system() -> None:
    """Restore the system's handlers: Python's would wait for the window's native loop to end."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets
            signal.signal(number, signal.SIG_DFL)


def _require_a_display() -> None:
    """Raises DeviceError if there is no display, or for root: Linux's browser engine would end the
    process without a message."""
    if sys.platform != "linux":
        return
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        raise DeviceError("there is no display for a window", remedy=_BROWSER_INSTEAD)
    unprotected = "--no-sandbox" in os.environ.get("QTWEBENGINE_CHROMIUM_FLAGS", "")
    unprotected = unprotected or os.environ.get("QTWEBENGINE_DISABLE_SANDBOX") == "1"
    if os.geteuid() == 0 and not unprotected:
        raise DeviceError(
            "the window's browser engine protects itself only from users other than root",
            remedy=f"Run it as another user. Or: {_BROWSER_INSTEAD}",
        )
