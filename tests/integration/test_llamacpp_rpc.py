"""Models spread over llama.cpp's RPC servers: two processes on this machine.

Needs a llama-cpp-python that was compiled with RPC, and the program ggml-rpc-server of the same
llama.cpp: in EDGE_SPEC_RPC_SERVER, or in the PATH. See docs/models.md.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.engine.results import GenerationResult
from edge_spec.errors import DeviceError
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import devices

PROGRAMS = ("ggml-rpc-server", "rpc-server")
PROGRAM = os.environ.get("EDGE_SPEC_RPC_SERVER") or next(
    filter(None, map(shutil.which, PROGRAMS)), None
)


def has_rpc() -> bool:
    try:
        import llama_cpp
    except ImportError:
        return False
    return bool(llama_cpp.llama_supports_rpc())


pytestmark = [
    pytest.mark.skipif(not has_rpc(), reason="needs a llama-cpp-python compiled with RPC"),
    pytest.mark.skipif(
        PROGRAM is None, reason="needs ggml-rpc-server in EDGE_SPEC_RPC_SERVER or in the PATH"
    ),
]

Run = Callable[..., GenerationResult]
PROMPT = "one two one two one two"


class Server:
    """One process that serves this machine's CPU."""

    def __init__(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self._port = held.getsockname()[1]
        command = [str(PROGRAM), "--host", "127.0.0.1", "-p", str(self._port), "-t", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:  # until it listens
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except ConnectionRefusedError:
                assert self._process.poll() is None, "the server has ended"
            else:
                break

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self._port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started = [Server(), Server()]
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def answer(tiny: Any, tmp_path: Path) -> Run:
    """answer(**options): of a model with layers for all. The cache's type is one that devices have,
    too."""
    path = tiny.write_gguf(tiny.build(num_hidden_layers=6), tmp_path / "model.gguf")

    def generate(**options: Any) -> GenerationResult:
        chosen = LoadOptions(runtime="llamacpp", kv_type="f16", threads=1, **options)
        with load_engine(str(path), chosen, lambda what, fraction: None) as engine:
            return engine.generate(PROMPT, max_tokens=64)

    return generate


def test_the_text_of_two_servers_is_the_local_text_with_and_without_speculation(
    answer: Run, servers: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    local = answer(drafter="none")
    names = tuple(server.name for server in servers)
    with caplog.at_level(logging.DEBUG):
        plain = answer(drafter="none", rpc=names)
    assert plain.text == local.text
    for name in names:  # each holds some of the weights and of the cache
        told = [line for line in caplog.messages if f"[{name}]" in line]
        assert any("model buffer size" in line for line in told)
        assert any("KV buffer size" in line for line in told)
    speculative = answer(drafter="lookahead", rpc=names)
    assert speculative.text == local.text
    assert 0 < speculative.stats.draft_n_accepted < speculative.stats.draft_n


def test_a_server_that_is_gone_since_it_was_listed_is_refused(
    gguf: Callable[..., Path], servers: list[Server]
) -> None:
    names = tuple(server.name for server in servers)
    runtime: Any = runtimes.load_runtime("llamacpp")
    options = RuntimeOptions(threads=1, rpc_servers=names)
    assert all(device.fault is None for device in runtime.devices(options))
    servers[1].kill()
    with pytest.raises(DeviceError, match=f"{names[1]} cannot be used: no connection"):
        runtime.open(runtimes.open_model_info(gguf()), options)
    assert runtime.devices(options)[-1].fault


def test_a_server_that_is_busy_or_no_server_is_refused_in_time(
    gguf: Callable[..., Path], servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself would wait for ever. The server serves on when it is free again."""
    monkeypatch.setattr(devices, "_FREE_S", 0.5)
    runtime: Any = runtimes.load_runtime("llamacpp")
    published = runtimes.open_model_info(gguf())
    options = RuntimeOptions(threads=1, rpc_servers=(servers[0].name,))
    model = runtime.open(published, options)
    with pytest.raises(DeviceError, match=f"{servers[0].name} .*it serves another client"):
        runtime.open(published, options)
    model.close()
    runtime.open(published, options).close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeviceError, match=f"{name} cannot be used: it serves another client"):
            runtime.open(published, replace(options, rpc_servers=(name,)))


DYING = """
import os, signal, sys
from pathlib import Path
from edge_spec.models import runtimes
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree

path, server, process = sys.argv[1:]
options = RuntimeOptions(threads=1, rpc_servers=(server,))
model = runtimes.load_runtime("llamacpp").open(runtimes.open_model_info(Path(path)), options)
session = model.open_session()
session.forward(TokenTree.chain(1))
os.kill(int(process), signal.SIGKILL)
for _ in range(100):
    session.forward(TokenTree.chain(1))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_server_that_dies_ends_the_process_with_one_line(
    gguf: Callable[..., Path], servers: list[Server]
) -> None:
    """llama.cpp allows nothing else; without a trace, and without a debugger that writes one."""
    arguments = [str(gguf()), servers[0].name, str(servers[0]._process.pid)]
    command = [sys.executable, "-c", DYING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "edge-spec: llama.cpp cannot go on: Remote RPC server crashed or returned malformed "
        "response. Start an RPC server that is gone again.\n"
    )
