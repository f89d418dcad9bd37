"""The command line as a user runs it, on the demo model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.loader import open as opening
from edge_spec.scheduler.profile import Profile

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"


# By which further rows are free, however busy the machine is: all draft tokens are verified that
# are likely at all. Passes that are observed scale it, which leaves nothing nothing.
FREE_ROWS = Profile({1: 1.0, 8: 1.0}, rounds=1, spread=0.0)


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what pays here, and now, does not decide what is tested."""
    monkeypatch.setattr(opening, "load_profile", lambda key: FREE_ROWS)


@pytest.fixture(scope="session")
def command() -> list[str]:
    return [sys.executable, "-c", MAIN]


@pytest.fixture(scope="session")
def converted(command: list[str], demo_gguf: Path) -> None:
    """The first use converts the demo model and says so; those after it are silent."""
    first = [*command, "generate", "Hi", "--max-tokens", "1"]
    subprocess.run(first, capture_output=True, check=False, timeout=300)


@pytest.fixture(scope="session")
def edge_spec(command: list[str], converted: None) -> Run:
    """Runs `edge-spec ARGUMENTS` as its own process, its input given as text."""

    def run(
        *arguments: str, text: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments],
            input=text,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, **environment},
            check=False,
            timeout=300,
        )

    return run
