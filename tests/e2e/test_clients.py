"""What others build on OpenAI's API, against this server: each suite runs in an environment of its
own, since their packages bring plugins of pytest and pins of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import edge_spec
from edge_spec.apps.server import RunningServer, ServerOptions

pytestmark = [pytest.mark.model, pytest.mark.slow]

SUITES = Path(__file__).parent / "clients"
PYTHON = os.environ.get("EDGE_SPEC_CLIENTS")
NODE_CLIENTS = os.environ.get("EDGE_SPEC_NODE_CLIENTS")


@pytest.mark.skipif(PYTHON is None, reason="EDGE_SPEC_CLIENTS names no Python with these clients")
@pytest.mark.parametrize("suite", ["langchain_suite.py", "others_suite.py"])
def test_clients_get_what_they_expect(suite: str, demo_gguf: Path) -> None:
    passes([str(PYTHON), "-m", "pytest", "-q", "--tb=short", suite])


@pytest.mark.skipif(
    NODE_CLIENTS is None, reason="EDGE_SPEC_NODE_CLIENTS names no folder with these clients"
)
def test_clients_of_node_get_what_they_expect(demo_gguf: Path) -> None:
    passes(["node", "--test", "openai_suite.mjs"])


def passes(command: Sequence[str]) -> None:
    with (
        edge_spec.load("smollm2") as llm,
        RunningServer(llm, ServerOptions(port=0, parallel=2)) as server,
    ):
        done = subprocess.run(
            command,
            cwd=SUITES,
            env={**os.environ, "EDGE_SPEC_URL": f"{server.url}/v1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
