"""What clients lose beside some that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

from serve_clients import (
    Seen,
    ask,
    chat_body,
    http_request,
    long_prompt,
    quantile,
    short_prompts,
    token_ms,
    watch_memory,
)
from servers import Server

HUGE_BYTES = 10_000_000
MISCHIEF_S = 1.0  # between two of one client: the server is tested, not what a flood takes
NEVER_READS_S = 30.0
STORY = "Tell a very long story."
STORY_TOKENS = 4096
NUM_LONG = 3  # prompts, in turns
BESIDE, HOSTILE = "beside long", "hostile"  # what short prompts are asked beside

Misbehaves = Callable[[Server, float], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Mix:
    """clients: that ask short prompts. long_tokens: of the prompts of one more client."""

    clients: int
    tokens: int
    num_prompts: int
    long_tokens: int
    calm_s: float
    hostile_s: float


def measure(server: Server, mix: Mix) -> dict[str, Any]:
    """First alone, then calm, then beside long prompts only, then hostile."""
    prompts = short_prompts(mix.num_prompts)
    long = [long_prompt(number, mix.long_tokens) for number in range(NUM_LONG)]
    expected = {
        prompt: asyncio.run(ask(server, prompt, mix.tokens)).text for prompt in [*long, *prompts]
    }
    calm = asyncio.run(_calm(server, mix, prompts, expected))
    asked = prompts, long
    beside, reading = asyncio.run(_beside(server, mix, asked, expected, (), mix.calm_s))
    misbehaving = (never_reads, leaves, sends_too_much)
    shorts, longs = asyncio.run(_beside(server, mix, asked, expected, misbehaving, mix.hostile_s))
    seen = {"calm": calm, BESIDE: beside, "long": reading}
    seen |= {HOSTILE: shorts, "long among hostile": longs}
    found = {name: summary(each) for name, each in seen.items()}
    for each in (calm, beside, shorts):
        each.require_answers()
    found["lost"] = {
        "answers": sum(len(each.errors) + each.num_differing for each in seen.values()),
        "median_beside_long": _ratio(found, BESIDE, "median"),
        "median_round": _ratio(found, HOSTILE, "median"),
        "worst_round": _ratio(found, HOSTILE, "max"),
    }
    return found


def _ratio(found: dict[str, Any], beside: str, which: str) -> float:
    return float(found[beside]["round_ms"][which] / found["calm"]["round_ms"][which])


async def _calm(server: Server, mix: Mix, prompts: list[str], expected: dict[str, str]) -> Seen:
    seen, until = Seen(), time.perf_counter() + mix.calm_s
    await _together(server, _clients(server, mix, prompts, expected, seen, until), seen)
    return seen


async def _beside(
    server: Server,
    mix: Mix,
    prompts: tuple[list[str], list[str]],
    expected: dict[str, str],
    misbehaving: Sequence[Misbehaves],
    seconds: float,
) -> tuple[Seen, Seen]:
    """Returns what those with short prompts saw, and the one with long ones."""
    shorts, longs, until = Seen(), Seen(), time.perf_counter() + seconds
    short, long = prompts
    tasks = _clients(server, mix, short, expected, shorts, until)
    tasks.append(_client(server, 0, long, expected, mix.tokens, longs, until))
    tasks += [misbehaves(server, until) for misbehaves in misbehaving]
    await _together(server, tasks, shorts)
    return shorts, longs


async def _together(server: Server, tasks: list[Coroutine[Any, Any, None]], seen: Seen) -> None:
    watching = asyncio.create_task(watch_memory(server, seen))
    await asyncio.gather(*tasks)
    watching.cancel()


def _clients(
    server: Server,
    mix: Mix,
    prompts: list[str],
    expected: dict[str, str],
    seen: Seen,
    until: float,
) -> list[Coroutine[Any, Any, None]]:
    return [
        _client(server, first, prompts, expected, mix.tokens, seen, until)
        for first in range(mix.clients)
    ]


async def _client(
    server: Server,
    first: int,
    prompts: list[str],
    expected: dict[str, str],
    tokens: int,
    seen: Seen,
    until: float,
) -> None:
    for number in count(first):
        if time.perf_counter() >= until:
            return
        prompt = prompts[number % len(prompts)]
        try:
            answer = await ask(server, prompt, tokens)
        except (OSError, ValueError) as error:
            seen.errors.append(str(error))
        else:
            seen.compare(answer, expected[prompt])


async def never_reads(server: Server, until: float) -> None:
    while (left := until - time.perf_counter()) > 0:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, (server.host, server.port))
        _, writer = await asyncio.open_connection(sock=small, limit=1)  # stops after its first read
        writer.write(_story())
        await asyncio.sleep(min(left, NEVER_READS_S))
        writer.transport.abort()


async def leaves(server: Server, until: float) -> None:
    """In the middle of an answer."""
    while time.perf_counter() < until:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(_story())
        with suppress(OSError):
            async for line in reader:
                if b"content" in line:
                    break
        writer.transport.abort()
        await asyncio.sleep(MISCHIEF_S)


async def sends_too_much(server: Server, until: float) -> None:
    while time.perf_counter() < until:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        with suppress(OSError):
            writer.write(http_request(b'{"messages": "' + b"x" * HUGE_BYTES + b'"}'))
            await writer.drain()
            await reader.read()
        writer.transport.abort()
        await asyncio.sleep(MISCHIEF_S)


def _story() -> bytes:
    return http_request(json.dumps(chat_body(STORY, STORY_TOKENS)).encode())


def summary(seen: Seen) -> dict[str, Any]:
    if not seen.answers:
        return {"answers": 0, "errors": seen.errors, "differing_texts": 0}
    firsts = seen.firsts_s
    gaps = sorted(gap for answer in seen.answers for gap in answer.gaps_s)
    found = {
        "answers": len(seen.answers),
        "errors": seen.errors,
        "differing_texts": seen.num_differing,
        "tokens_per_s": seen.tokens_per_s,
        "token_ms": token_ms(seen.answers),
        "first_ms": _spread(firsts),
        "round_ms": _spread(gaps),
    }
    if after := seen.memory_bytes[len(seen.memory_bytes) // 4 :]:  # without the warm-up
        found["memory_mb"] = {"begin": after[0] / 1e6, "end": after[-1] / 1e6}
        found["memory_growth"] = max(after) / after[0] - 1
    return found


def _spread(ascending: list[float]) -> dict[str, float]:
    found = {"median": median(ascending), "p95": quantile(ascending, 0.95), "max": ascending[-1]}
    return {name: seconds * 1e3 for name, seconds in found.items()}


def markdown(found: dict[str, Any]) -> str:
    lines = [
        "| | answers | errors | texts that differ | tokens/s of all | first text, ms: median, 95th "
        "percentile, worst | round, ms: median, 95th percentile, worst | memory, MB, and growth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        if name == "lost":
            continue
        if not each["answers"]:
            lines.append(f"| {name} | 0 | {len(each['errors'])} | | | | | |")
            continue
        first, rounds = (
            ", ".join(f"{each[which][of]:.0f}" for of in ("median", "p95", "max"))
            for which in ("first_ms", "round_ms")
        )
        memory = ""
        if "memory_mb" in each:
            memory = f"{each['memory_mb']['end']:.0f}, {each['memory_growth']:+.1%}"
        lines.append(
            f"| {name} | {each['answers']} | {len(each['errors'])} | {each['differing_texts']} | "
            f"{each['tokens_per_s']:.1f} | {first} | {rounds} | {memory} |"
        )
    return "\n".join(lines)
