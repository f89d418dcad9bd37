"""Fixtures shared by all tests. Nothing here reaches the network but `demo_gguf`, which fetches
the demo model once into edge-spec's cache, as the first use of `smollm2` does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_spec.models.demo import fetch_demo_model

# Windows has not all of them.
END_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


@pytest.fixture(scope="session", autouse=True)
def signals_on() -> Iterator[None]:
    """A process inherits the signals that are turned off, as nohup and jobs in the background turn
    off some, and commands leave those as they are."""
    off = [number for number in END_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in off:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    yield
    for number in off:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return fetch_demo_model(lambda what, fraction: None)
