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
    """writers: that ask at once for so many `tokens`, which have to last longer than it takes to
    read a prompt of `length` tokens that is sent `after_s` later."""

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
    async def comes_later() -> Answer:
        await asyncio.sleep(plan.after_s)
        return await ask(server, long_prompt(0, plan.length), _LAST_TOKENS)

    writing = [ask(server, prompt, plan.tokens) for prompt in short_prompts(plan.writers)]
    reader, *writers = await asyncio.gather(comes_later(), *writing)
    began, first = reader.began, reader.times[0]
    if max(writer.times[0] for writer in writers) > began:
        raise SystemExit("not all wrote when the long prompt came: give a longer --after")
    if min(writer.times[-1] for writer in writers) < first:
        raise SystemExit("an answer ended before the long prompt was read: give more --tokens")
    meanwhile = [_within(writer, began, first) for writer in writers]
    pauses = [after - before for times in meanwhile for before, after in pairwise(times)]
    earlier = [at for writer in writers for at in writer.times if at < began]
    return Stall(
        reader.first_s,
        1e3 * max(pauses),
        1e3 * median(pauses),
        sum(len(times) - 2 for times in meanwhile) / reader.first_s,
        len(earlier) / (began - min(earlier)),
    )


def _within(writer: Answer, began: float, first: float) -> list[float]:
    """Returns when its texts came between the two, with the one before and the one after."""
    times = writer.times
    start = max(at for at, time in enumerate(times) if time <= began)
    end = min(at for at, time in enumerate(times) if time >= first)
    return list(times[start : end + 1])


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
