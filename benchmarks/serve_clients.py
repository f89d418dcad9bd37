"""Servers that benchmarks ask, ours and others that answer OpenAI's API; what their clients ask
of them, and what they see."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from common import OWN_PROMPTS, read_prompts

_START_S = 120.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"
_TOKEN_CHARACTERS = 4.2  # of the packaged prompts, about
_SAMPLED_S = 0.2  # between two looks at a server's memory


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


@dataclass(frozen=True)
class Answer:
    """One answer. Times are in seconds, of the clock `time.perf_counter`."""

    text: str
    num_tokens: int
    began: float
    times: tuple[float, ...]  # when each piece of the text came
    timings: Mapping[str, Any] = field(default_factory=dict)  # what the server tells of it

    @property
    def first_s(self) -> float:
        return self.times[0] - self.began

    @property
    def token_s(self) -> float | None:
        """Seconds a token, from the first piece to the last; None where all came at once."""
        spread = len(self.times) > 1 and self.num_tokens > 1
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if spread else None


@dataclass
class Seen:
    """Collects what clients saw together."""

    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_differing: int = 0
    memory_bytes: list[int] = field(default_factory=list)  # of the server, now and then

    def compare(self, answer: Answer, expected: str | None) -> None:
        self.answers.append(answer)
        if expected is not None:
            self.num_compared += 1
            self.num_differing += answer.text != expected

    def require_answers(self) -> None:
        if not self.answers:
            raise SystemExit(f"no answer came; errors: {self.errors[:3]}")

    @property
    def tokens_per_s(self) -> float:
        """The rate of all together, from the first request to the last piece."""
        began = min(answer.began for answer in self.answers)
        ended = max(answer.times[-1] for answer in self.answers)
        return sum(answer.num_tokens for answer in self.answers) / (ended - began)

    @property
    def firsts_s(self) -> list[float]:
        return sorted(answer.first_s for answer in self.answers)


def token_ms(answers: list[Answer]) -> float:
    return median(answer.token_s for answer in answers if answer.token_s is not None) * 1e3


def quantile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(len(ascending) * share))]


def chat_body(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request that streams."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def http_request(body: bytes) -> bytes:
    """HTTP/1.0: the end of the connection is the end of the answer."""
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(server: Server, prompt: str, max_tokens: int, **more: Any) -> Answer:
    """Reads all lines first and takes them apart afterwards, so that the time is the server's.
    Raises OSError and ValueError."""
    body = json.dumps(chat_body(prompt, max_tokens, **more)).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(http_request(body))
        lines = [(time.perf_counter(), line) async for line in reader]
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if not lines or b" 200 " not in lines[0][1]:
        raise ValueError(lines[-1][1].decode() if lines else "no response")
    return _read(lines, began)


def _read(lines: list[tuple[float, bytes]], began: float) -> Answer:
    """Raises ValueError for an answer that was cut or tells an error."""
    text, times, num_tokens, timings = "", [], 0, {}
    for at, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ValueError(event["error"]["message"])
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        timings = event.get("timings") or timings
        piece = (event["choices"][0]["delta"] if event["choices"] else {}).get("content")
        if piece:
            text += piece
            times.append(at)
    if not num_tokens or not times:
        raise ValueError("the answer was cut")
    return Answer(text, num_tokens, began, tuple(times), timings)


async def watch_memory(server: Server, seen: Seen) -> None:
    """Notes the memory of the server until it is cancelled."""
    while (resident := server.resident_bytes()) is not None:
        seen.memory_bytes.append(resident)
        await asyncio.sleep(_SAMPLED_S)


def short_prompts(count: int) -> list[str]:
    """Returns prompts of all kinds, in turns."""
    entries = read_prompts(OWN_PROMPTS)
    step = max(1, len(entries) // count)
    return [entry["prompt"] for entry in (entries[::step] + entries[1::step])[:count]]


def long_prompt(number: int, num_tokens: int) -> str:
    """Makes a prompt of about `num_tokens`. Prompts of two numbers do not begin alike, so no cache
    knows one by the other."""
    texts = [entry["prompt"] for entry in read_prompts(OWN_PROMPTS)]
    notes, length = [f"Below are {number + 2} times ten notes."], 0
    for at, text in enumerate(islice(cycle(texts), number, None), start=1):
        if length > num_tokens * _TOKEN_CHARACTERS:
            break
        notes.append(f"Note {at}: {text}")
        length += len(notes[-1])
    return "\n\n".join([*notes, "What do these notes have in common? Answer in three sentences."])
