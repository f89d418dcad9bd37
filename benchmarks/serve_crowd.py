"""Many conversations at once for minutes: does each get the text of its own run, does memory stay
level, is anything lost?"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from statistics import median
from typing import Any, NamedTuple

from serve_clients import Seen, Server, ask, short_prompts, watch_memory

_LEAVING = 0.1  # of all requests: the client goes away in the middle of the answer
_SHARE = 0.2  # of the samples of memory, at either end of the second half

Opens = Callable[[], AbstractContextManager[Server]]


class Plan(NamedTuple):
    """clients: each asks for answers of at most `tokens`, one after the other, of one of `prompts`
    prompts, until the time is over."""

    clients: int
    prompts: int
    tokens: int
    minutes: float


def measure(opens: Opens, opens_alone: Opens, plan: Plan) -> dict[str, Any]:
    """opens_alone: the server that one client has to itself, whose texts are the expected ones."""
    prompts = short_prompts(plan.prompts)
    with opens_alone() as server:
        alone = {prompt: asyncio.run(ask(server, prompt, plan.tokens)).text for prompt in prompts}
    with opens() as server:
        seen, num_left = asyncio.run(_crowd(server, alone, plan))
    later = seen.memory_bytes[len(seen.memory_bytes) // 2 :]
    some = max(1, int(len(later) * _SHARE))
    return {
        "answers": len(seen.answers),
        "left": num_left,
        "differing": seen.num_differing,
        "errors": seen.errors[:20],
        "num_errors": len(seen.errors),
        "tokens_per_s": seen.tokens_per_s,
        "memory_gb": [median(part) / 1e9 for part in (later[:some], later[-some:])],
    }


async def _crowd(server: Server, alone: dict[str, str], plan: Plan) -> tuple[Seen, int]:
    seen, num_left = Seen(), 0
    until = time.monotonic() + 60 * plan.minutes

    async def client(number: int) -> None:
        nonlocal num_left
        draw = random.Random(number)
        while time.monotonic() < until:
            prompt = draw.choice(list(alone))
            asking = asyncio.create_task(ask(server, prompt, plan.tokens))
            if draw.random() < _LEAVING:
                await asyncio.sleep(draw.random())
                asking.cancel()
                with suppress(asyncio.CancelledError, OSError, ValueError):
                    await asking
                num_left += 1
                continue
            try:
                seen.compare(await asking, alone[prompt])
            except (OSError, ValueError) as error:
                seen.errors.append(str(error))

    watching = asyncio.create_task(watch_memory(server, seen))
    await asyncio.gather(*map(client, range(plan.clients)))
    watching.cancel()
    return seen, num_left


def summary(found: dict[str, Any]) -> str:
    before, after = found["memory_gb"]
    return (
        f"{found['answers']} answers, {found['differing']} of them other than alone, "
        f"{found['num_errors']} errors; {found['left']} clients left; "
        f"{found['tokens_per_s']:.1f} tokens/s; memory in the middle {before:.2f} GB, "
        f"at the end {after:.2f} GB"
    )
