"""Fixtures shared by all tests. Nothing here reaches the network but `demo_gguf`, which fetches
the demo model once into edge-spec's cache, as the first use of `smollm2` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.demo_model import fetch_demo_model


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return fetch_demo_model(lambda what, fraction: None)
