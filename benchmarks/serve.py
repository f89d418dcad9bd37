"""The server under load: many clients at once, one alone beside the SDK, and some that misbehave.

    python benchmarks/serve.py
    python benchmarks/serve.py --clients 4 --seconds 10 --single-rounds 1 --hostile

Starts `edge-spec serve` in a process of its own and asks it, greedily, what the SDK has answered
before in this process. First one client alone and the SDK in turns: time a token, from an answer's
first text to its last, medians over prompts and rounds, and their ratio. Then `--clients` that
stream for `--seconds`: errors, texts that differ from the SDK's, the time to the first text, and
the server's resident memory every second, whose warm-up is the first quarter. With `--hostile` the
same once more beside a client that never reads, one that leaves in the middle of an answer, and one
that sends 10 MB. The clients share the machine's cores with the server. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.engine.engine import Engine

HUGE_BYTES = 10_000_000
MISCHIEF_S = 1.0  # between two of one client: the server is tested, not what a flood takes
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"


@dataclass(frozen=True)
class Timed:
    """An answer. Times are in seconds."""

    text: str
    first_s: float
    token_s: float | None  # None for an answer that came at once


@dataclass
class Load:
    """What clients saw while they were at it."""

    answers: list[Timed] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    differing: int = 0
    memory_bytes: list[int] = field(default_factory=list)  # of the server, every second

    def summary(self) -> dict[str, Any]:
        if not self.answers:
            raise SystemExit(f"no answer came, give more --seconds; errors: {self.errors[:3]}")
        firsts = sorted(answer.first_s for answer in self.answers)
        after = self.memory_bytes[len(self.memory_bytes) // 4 :]
        return {
            "answers": len(self.answers),
            "errors": self.errors,
            "differing_texts": self.differing,
            "first_text_ms": {
                "median": median(firsts) * 1e3,
                "p95": firsts[int(len(firsts) * 0.95)] * 1e3,
                "max": firsts[-1] * 1e3,
            },
            "token_ms": token_ms(self.answers),
            "memory_mb": {"begin": after[0] / 1e6, "end": after[-1] / 1e6, "max": max(after) / 1e6},
            "memory_growth": max(after) / after[0] - 1,
        }


def token_ms(answers: list[Timed]) -> float:
    return median(answer.token_s for answer in answers if answer.token_s is not None) * 1e3


def timed(text: str, began: float, times: list[float], num_tokens: int) -> Timed:
    """times: when each piece of the text came."""
    spread = len(times) > 1 and num_tokens > 1
    token_s = (times[-1] - times[0]) / (num_tokens - 1) if spread else None
    return Timed(text, times[0] - began, token_s)


def ask_sdk(engine: Engine, prompt: str, max_tokens: int) -> Timed:
    began = time.perf_counter()
    generation = engine.chat(prompt, max_tokens=max_tokens, stream=True)
    times = [time.perf_counter() for chunk in generation if chunk.text]
    result = generation.result
    return timed(result.text, began, times, result.stats.predicted_n)


def request(prompt: str, max_tokens: int, **more: str) -> bytes:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **more,
    }
    return headed(json.dumps(body).encode())


def headed(body: bytes) -> bytes:
    """HTTP/1.0: the end of the connection is the end of the answer."""
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask_server(port: int, prompt: str, max_tokens: int, **more: str) -> Timed:
    """Reads all lines first and takes them apart afterwards, so that the time is the server's.
    Raises OSError and ValueError."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(prompt, max_tokens, **more))
        lines = [(time.perf_counter(), line) async for line in reader]
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if not lines or b" 200 " not in lines[0][1]:
        raise ValueError(lines[-1][1].decode() if lines else "no response")
    text, times, num_tokens = "", [], 0
    for at, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ValueError(event["error"]["message"])
        num_tokens = event.get("timings", {}).get("predicted_n", num_tokens)
        piece = (event["choices"][0]["delta"] if event["choices"] else {}).get("content")
        if piece:
            text += piece
            times.append(at)
    if not num_tokens:
        raise ValueError("the answer was cut")
    return timed(text, began, times, num_tokens)


async def client(
    port: int, first: int, expected: dict[str, str], max_tokens: int, until: float, load: Load
) -> None:
    prompts = list(expected)
    for number in count(first):
        if time.perf_counter() >= until:
            return
        prompt = prompts[number % len(prompts)]
        try:
            answer = await ask_server(port, prompt, max_tokens)
        except (OSError, ValueError) as error:
            load.errors.append(str(error))
            continue
        load.answers.append(answer)
        load.differing += answer.text != expected[prompt]


async def watch(pid: int, until: float, load: Load) -> None:
    while time.perf_counter() < until:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        load.memory_bytes.append(pages * PAGE_BYTES)
        await asyncio.sleep(1.0)


async def never_reads(port: int, until: float) -> None:
    while (left := until - time.perf_counter()) > 0:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", port))
        _, writer = await asyncio.open_connection(sock=small, limit=1)  # stops after its first read
        writer.write(request("Tell a very long story.", 4096))
        await asyncio.sleep(min(left, 30.0))
        writer.transport.abort()


async def leaves(port: int, until: float) -> None:
    while time.perf_counter() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("Tell a very long story.", 4096))
        with suppress(OSError):
            async for line in reader:
                if b"content" in line:
                    break
        writer.transport.abort()
        await asyncio.sleep(MISCHIEF_S)


async def sends_too_much(port: int, until: float) -> None:
    while time.perf_counter() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError):
            writer.write(headed(b'{"messages": "' + b"x" * HUGE_BYTES + b'"}'))
            await writer.drain()
            await reader.read()
        writer.transport.abort()
        await asyncio.sleep(MISCHIEF_S)


async def under_load(
    server: tuple[int, int], expected: dict[str, str], arguments: argparse.Namespace, hostile: bool
) -> Load:
    pid, port = server
    load, until = Load(), time.perf_counter() + arguments.seconds
    tasks: list[Coroutine[Any, Any, None]] = [watch(pid, until, load)]
    tasks += [
        client(port, number, expected, arguments.tokens, until, load)
        for number in range(arguments.clients)
    ]
    if hostile:
        tasks += [misbehaves(port, until) for misbehaves in (never_reads, leaves, sends_too_much)]
    await asyncio.gather(*tasks)
    return load


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Its process and its port."""
    command = [sys.executable, "-c", MAIN, "serve", arguments.model, "--json", "--port", "0"]
    command += ["--drafter", arguments.drafter, "--parallel", str(arguments.parallel)]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline())["port"]
    finally:
        process.terminate()
        process.wait()


def alone(
    engine: Engine, port: int, prompts: list[str], arguments: argparse.Namespace
) -> dict[str, float]:
    """The SDK and a client of the server in turns, after one round of each that does not count."""
    sdk: list[Timed] = []
    client: list[Timed] = []
    for number in range(arguments.single_rounds + 1):
        for prompt in prompts:
            ours = ask_sdk(engine, prompt, arguments.tokens)
            asking = ask_server(port, prompt, arguments.tokens, session_id="alone")  # one cache
            theirs = asyncio.run(asking)
            if number:
                sdk.append(ours)
                client.append(theirs)
    found = {"sdk_token_ms": token_ms(sdk), "client_token_ms": token_ms(client)}
    return {**found, "ratio": found["client_token_ms"] / found["sdk_token_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--single-rounds", type=int, default=3)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts = [entry["prompt"] for entry in read_prompts(arguments.prompts)][: arguments.num_prompts]
    options = {"drafter": arguments.drafter, "threads": arguments.threads}
    results: dict[str, Any] = {}
    with open_engine(arguments.model, **options) as engine, server(arguments) as running:
        expected = {text: ask_sdk(engine, text, arguments.tokens).text for text in texts}
        if arguments.single_rounds:
            results["alone"] = alone(engine, running[1], texts, arguments)
        for name in ("load", "hostile") if arguments.hostile else ("load",):
            load = asyncio.run(under_load(running, expected, arguments, name == "hostile"))
            results[name] = load.summary()
    show(results)
    report(results, arguments.json)


def show(results: dict[str, Any]) -> None:
    if "alone" in results:
        print("alone: {sdk_token_ms:.2f} ms a token from the SDK,".format(**results["alone"]))
        print(
            "       {client_token_ms:.2f} from the server, {ratio:.3f}x".format(**results["alone"])
        )
    print(f"{'':8s}  answers  errors  differ  first text ms: median/p95/max  token ms  memory MB")
    for name in ("load", "hostile"):
        if name not in results:
            continue
        found = results[name]
        first, memory = found["first_text_ms"], found["memory_mb"]
        print(
            f"{name:8s}{found['answers']:9d}{len(found['errors']):8d}{found['differing_texts']:8d}"
            f"{first['median']:16.0f}{first['p95']:9.0f}{first['max']:8.0f}{found['token_ms']:9.2f}"
            f"{memory['begin']:8.0f} +{found['memory_growth']:.1%}"
        )


if __name__ == "__main__":
    main()
