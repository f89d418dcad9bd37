"""What those who write wait while another client's long prompt is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from serve_clients import Answer, Server, ask, long_prompt, short_prompts

_LAST_TOKENS = 4  # of the long prompt's answer

Opens = Callable[[], AbstractContextManager[Server]]


class Stall(NamedTuple):
    """first_s: until the long prompt's first text. longest_ms, median_ms: between two texts of the
    others meanwhile. tokens_per_s: that they wrote together meanwhile; before_per_s: before."""

    first_s: float
    longest_ms: float
    median_ms: float
    tokens_per_s: float
    before_per_s: float


class Plan(NamedTuple):
    """writers: that ask for answers of `tokens` one after the other until a prompt of `length`
    tokens, which is sent `after_s` later, was read."""

    writers: int
    tokens: int
    length: int
    after_s: float


def measure(opens: dict[str, Opens], plan: Plan) -> dict[str, Any]:
    """One server after the other."""
    found = {}
    for arm, opened in opens.items():
        with opened() as server:
            asyncio.run(ask(server, short_prompts(1)[0], _LAST_TOKENS))
            found[arm] = asyncio.run(_stall(server, plan))._asdict()
    return found


async def _stall(server: Server, plan: Plan) -> Stall:
    was_read = asyncio.Event()

    async def reads() -> Answer:
        await asyncio.sleep(plan.after_s)
        answer = await ask(server, long_prompt(0, plan.length), _LAST_TOKENS)
        was_read.set()
        return answer

    async def writes(prompt: str) -> list[float]:
        times: list[float] = []
        while not was_read.is_set():
            times += (await ask(server, prompt, plan.tokens)).times
        return times

    writing = [writes(prompt) for prompt in short_prompts(plan.writers)]
    reader, *writers = await asyncio.gather(reads(), *writing)
    began, first = reader.began, reader.times[0]
    if max(times[0] for times in writers) > began:
        raise SystemExit("not all wrote when the long prompt came: give a longer --after")
    meanwhile = [_within(times, began, first) for times in writers]
    pauses = [after - before for times in meanwhile for before, after in pairwise(times)]
    earlier = [at for times in writers for at in times if at < began]
    return Stall(
        reader.first_s,
        1e3 * max(pauses),
        1e3 * median(pauses),
        sum(len(times) - 2 for times in meanwhile) / reader.first_s,
        len(earlier) / (began - min(earlier)),
    )


def _within(times: list[float], began: float, first: float) -> list[float]:
    """Returns when texts came between the two, with the one before and the one after."""
    start = max(at for at, time in enumerate(times) if time <= began)
    end = min((at for at, time in enumerate(times) if time >= first), default=len(times) - 1)
    return times[start : end + 1]


def markdown(found: dict[str, Any]) -> str:
    lines = [
        "| server | long prompt's first text, s | others wait, ms: longest, median | others write, "
        "tokens/s: before, meanwhile |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {arm} | {each['first_s']:.1f} | {each['longest_ms']:.0f}, {each['median_ms']:.0f} | "
        f"{each['before_per_s']:.0f}, {each['tokens_per_s']:.0f} |"
        for arm, each in found.items()
    ]
    return "\n".join(lines)
