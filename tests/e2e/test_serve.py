"""`edge-spec serve` as a process: how it starts, and how it ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures import documented, tiny_models

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]

BODY = {"prompt": "Once upon a time", "max_tokens": 2000, "stream": True}


@contextmanager
def serving(command: list[str], *arguments: str) -> Iterator[tuple[Any, str]]:
    with subprocess.Popen(
        [*command, "serve", "--port", "0", "--json", "--parallel", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            ready = json.loads(process.stdout.readline())
            assert ready["url"] == f"http://127.0.0.1:{ready['port']}"
            assert "models" not in ready or ready["models"][0] == ready["model"]
            yield process, ready["url"]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_cuts_the_answer_after_the_time_of_grace(edge_spec, command, number, status):
    with serving(command, "--grace", "0") as (process, url), httpx.Client(timeout=60) as client:
        assert client.get(f"{url}/v1/models").json()["data"][0]["id"] == "smollm2"
        with client.stream("POST", f"{url}/v1/completions", json=BODY) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(number)
            rest = "\n".join(lines)
        assert '"finish_reason": "length"' in rest and rest.rstrip().endswith("data: [DONE]")
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (status, "", "")


@pytest.mark.slow  # beside tests/integration/test_server_models.py
def test_several_models_answer_at_one_address(command, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))  # of their conversions
    one, two = (
        str(tiny_models.write_hf(tiny_models.build(variant), tmp_path / variant))
        for variant in ("llama", "qwen3")
    )
    options = ["--alias", "small=llama", "--max-models", "1"]
    with serving(command, one, two, *options) as (process, url), httpx.Client(timeout=60) as client:
        listed = client.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["small", "qwen3"]
        told = []
        for model in ("small", "qwen3", "llama"):
            body = {"model": model, "prompt": "hello", "max_tokens": 8}
            answer = client.post(f"{url}/v1/completions", json=body).json()
            told.append((answer["model"], answer["choices"][0]["text"]))
        assert [name for name, _ in told] == ["small", "qwen3", "small"]
        assert told[0] == told[2] and told[0][1] != told[1][1]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow  # beside one signal
def test_a_second_signal_does_not_wait(edge_spec, command):
    with serving(command, "--grace", "600") as (process, url), httpx.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/v1/completions", json=BODY) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            # It takes no new connections from then on, while the answer goes on.
            port = int(url.rpartition(":")[2])
            with pytest.raises(OSError):
                for line in lines:
                    if line:
                        socket.create_connection(("127.0.0.1", port), timeout=5).close()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow  # beside tests/integration/test_server_security.py
def test_a_mistake_ends_in_one_line(edge_spec):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, status, told in (
            (["--host", "0.0.0.0"], 2, "--api-key"),
            (["--parallel", "0"], 2, "'--parallel': Input should be"),
            (["--port", port], 1, "Choose another --port"),
        ):
            done = edge_spec("serve", *arguments)
            assert done.returncode == status
            assert told in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_its_libraries_the_install_command_is_named(edge_spec, tmp_path):
    # A module of that name that cannot be imported stands for a missing package.
    (tmp_path / "uvicorn.py").write_text("raise ImportError('not here')")
    done = edge_spec("serve", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert 'pip install -e ".[serve]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_options_are_documented(edge_spec):
    documented = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/serve.md").read_text("utf-8")))
    shown = edge_spec("serve", "--help", COLUMNS="200", NO_COLOR="1").stdout
    server = shown[shown.index(" Server ") :]
    panels = server[: server.index(" Sampling ")]  # those of the server, and of its limits
    offered = set(re.findall(r"--[a-z][a-z-]+", panels))
    assert len(offered) == 16 and offered <= documented


def test_the_documented_requests_are_answered(edge_spec, command):
    blocks = [each for each in documented.blocks() if each.test == "tests/e2e/test_serve.py"]
    kinds = [(each.page, each.language) for each in blocks]
    assert kinds == [
        (page, kind) for page in ("README.md", "docs/serve.md") for kind in ("sh", "python")
    ]
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with serving(command) as (_, url):
        for block in blocks:
            there = block.text.replace("http://127.0.0.1:8080", url)
            assert there != block.text
            run = ["bash", "-c"] if block.language == "sh" else [sys.executable, "-c"]
            done = subprocess.run(
                [*run, there], capture_output=True, text=True, check=False, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert "Paris" in done.stdout
