"""Servers that benchmarks ask: ours, and others that answer OpenAI's API."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_START_S = 120.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"


@dataclass(frozen=True)
class Server:
    """Holds where a server answers. pid: None where somebody else has started it."""

    host: str
    port: int
    pid: int | None = None

    def resident_bytes(self) -> int | None:
        """Memory that it has now, files that are mapped included. Linux only."""
        if self.pid is None:
            return None
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def server_at(url: str) -> Server:
    """One that runs, by its address, such as http://127.0.0.1:8080."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise SystemExit(f"{url} is no address of a server, such as http://127.0.0.1:8080")
    return Server(parts.hostname, parts.port or 80)


@contextmanager
def own_server(model: str, options: Sequence[str]) -> Iterator[Server]:
    """`edge-spec serve MODEL OPTIONS...` in a process of its own."""
    command = [sys.executable, "-c", _MAIN, "serve", model, "--json", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("our server did not start")
        yield Server("127.0.0.1", json.loads(line)["port"], process.pid)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def peer_server(command: str) -> Iterator[Server]:
    """Runs a command, whose {port} is a free one, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = shlex.split(command.replace("{port}", str(port)))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield Server("127.0.0.1", port, process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server does not answer: {shlex.join(map(str, process.args))}")
