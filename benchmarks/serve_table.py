"""Tokens a second of several clients at once, ours and other servers in turns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import cycle, islice, product
from statistics import median
from typing import Any

from serve_clients import Seen, Server, ask, long_prompt, quantile, short_prompts, watch_memory

KINDS = ("short", "long", "alike")
_FIRST_ALIKE = 100  # number of long prompts, beyond those of other rows
_LEAST_EACH = 4  # short answers of each client
_WARM_UP_TOKENS = 48  # in which a server loads what so many clients need

Opens = Callable[[], AbstractContextManager[Server]]
Cell = tuple[str, int, str]  # kind of prompt, clients, arm


@dataclass(frozen=True)
class Plan:
    """Says what is asked. answers: short ones of one client, shared out where there are more.
    Rows of long prompts, and of such that begin alike, are measured once, whatever `repeats` is."""

    clients: Sequence[int]
    long_clients: Sequence[int]
    kinds: Sequence[str]
    repeats: int
    tokens: int  # of an answer
    answers: int
    long_tokens: int  # of a long prompt

    def rows(self) -> Iterator[tuple[int, str, int]]:
        """Turn, kind of prompts and clients of each, in their order."""
        for repeat, kind in product(range(self.repeats), self.kinds):
            if kind == "short":
                yield from ((repeat, kind, clients) for clients in self.clients)
            elif repeat == 0:
                yield from ((repeat, kind, clients) for clients in self.long_clients)

    def prompts_of(self, kind: str, clients: int) -> list[list[str]]:
        """Returns the prompts of each client. A long one is asked once by each arm. Those that
        begin "alike" differ in their last sentence."""
        if kind == "long":
            first = sum(count for count in self.long_clients if count < clients)
            return [[long_prompt(first + each, self.long_tokens)] for each in range(clients)]
        if kind == "alike":
            text = long_prompt(_FIRST_ALIKE + clients, self.long_tokens)
            return [[f"{text} Begin with note {1 + each}."] for each in range(clients)]
        prompts = short_prompts(self.answers)
        each = max(_LEAST_EACH, self.answers // clients)
        return [
            list(islice(cycle(prompts), 3 * client, 3 * client + each)) for client in range(clients)
        ]

    def all_prompts(self) -> list[str]:
        found = [
            prompt
            for _, kind, clients in self.rows()
            for prompts in self.prompts_of(kind, clients)
            for prompt in prompts
        ]
        return list(dict.fromkeys(found))


def measure(opens: dict[str, Opens], alone_as: dict[str, str], plan: Plan) -> dict[str, Any]:
    """alone_as: of each that is measured, whose texts, decoded alone, its own are compared with; a
    server of it is started for them, so that no cache of the others knows a prompt."""
    alone = {arm: _alone(opens[arm], plan) for arm in dict.fromkeys(alone_as.values())}
    runs: dict[Cell, list[Seen]] = {}
    with ExitStack() as opened:
        servers = {arm: opened.enter_context(opens[arm]()) for arm in alone_as}
        for repeat, kind, clients in plan.rows():
            prompts = plan.prompts_of(kind, clients)
            for arm, server in in_turns(list(servers.items()), repeat):
                if repeat == 0 and kind == plan.kinds[0]:  # so many for the first time
                    warm_up = [[text] for text in short_prompts(clients)]
                    asyncio.run(_run(server, warm_up, {}, _WARM_UP_TOKENS))
                seen = asyncio.run(_run(server, prompts, alone[alone_as[arm]], plan.tokens))
                seen.require_answers()
                runs.setdefault((kind, clients, arm), []).append(seen)
                _say(f"{kind} {clients} {arm}: {seen.tokens_per_s:.1f} tokens/s")
    return {
        "cells": [
            {"kind": kind, "clients": clients, "server": arm, **summary(seen)}
            for (kind, clients, arm), seen in runs.items()
        ]
    }


def in_turns(servers: list[tuple[str, Server]], repeat: int) -> list[tuple[str, Server]]:
    """Another one first in each turn: what slows a machine down slows down all of them alike."""
    first = repeat % len(servers)
    return servers[first:] + servers[:first]


def _alone(opens: Opens, plan: Plan) -> dict[str, str]:
    """Texts by prompt, of one client that has the server to itself."""
    with opens() as server:
        return {
            prompt: asyncio.run(ask(server, prompt, plan.tokens)).text
            for prompt in plan.all_prompts()
        }


async def _run(
    server: Server, prompts: Sequence[Sequence[str]], expected: dict[str, str], tokens: int
) -> Seen:
    """prompts: of each client, asked one after the other."""
    seen = Seen()

    async def client(own: Sequence[str]) -> None:
        for prompt in own:
            try:
                answer = await ask(server, prompt, tokens)
            except (OSError, ValueError) as error:
                seen.errors.append(str(error))
            else:
                seen.compare(answer, expected.get(prompt))

    watching = asyncio.create_task(watch_memory(server, seen))
    await asyncio.gather(*map(client, prompts))
    watching.cancel()
    return seen


def summary(runs: Sequence[Seen]) -> dict[str, Any]:
    firsts = sorted(first for seen in runs for first in seen.firsts_s)
    memory = [each for seen in runs for each in seen.memory_bytes]
    return {
        "tokens_per_s": median(seen.tokens_per_s for seen in runs),
        "first_ms": median(firsts) * 1e3,
        "first_p95_ms": quantile(firsts, 0.95) * 1e3,
        "answers": sum(len(seen.answers) for seen in runs),
        "errors": [error for seen in runs for error in seen.errors],
        "equal": sum(seen.num_compared - seen.num_differing for seen in runs),
        "compared": sum(seen.num_compared for seen in runs),
        "memory_mb": max(memory) / 1e6 if memory else None,
    }


def markdown(cells: Sequence[dict[str, Any]], ours: str) -> str:
    """ours: the server whose rate is held against those of the others."""
    rates = {
        (cell["kind"], cell["clients"]): cell["tokens_per_s"]
        for cell in cells
        if cell["server"] == ours
    }
    lines = [
        f"| prompts | clients | server | tokens/s | {ours} over it | first text, ms: median, p95 | "
        "texts as decoded alone | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        over = rates[cell["kind"], cell["clients"]] / cell["tokens_per_s"]
        memory = "" if cell["memory_mb"] is None else f"{cell['memory_mb']:.0f}"
        lines.append(
            f"| {cell['kind']} | {cell['clients']} | {cell['server']} | "
            f"{cell['tokens_per_s']:.1f} | {over:.2f} | {cell['first_ms']:.0f}, "
            f"{cell['first_p95_ms']:.0f} | {cell['equal']} of {cell['compared']} | {memory} |"
        )
        if cell["errors"]:
            lines[-1] += f" {len(cell['errors'])} errors, such as {cell['errors'][0]} |"
    return "\n".join(lines)


def ratios(cells: Sequence[dict[str, Any]], ours: str) -> str:
    """One line for each other server and kind of prompts, as Markdown."""
    by_row = {(cell["kind"], cell["server"], cell["clients"]): cell for cell in cells}
    rows = dict.fromkeys((kind, server) for kind, server, _ in by_row if server != ours)
    lines = [
        f"| prompts | {ours} over | clients: tokens/s | clients: first text, median, p95 |",
        "|---|---|---|---|",
    ]
    for kind, server in rows:
        rates, firsts = [], []
        for clients in sorted({each for k, s, each in by_row if (k, s) == (kind, server)}):
            own, other = (by_row[kind, each, clients] for each in (ours, server))
            rates.append(f"{clients}: {own['tokens_per_s'] / other['tokens_per_s']:.2f}")
            waits = [f"{own[key] / other[key]:.2f}" for key in ("first_ms", "first_p95_ms")]
            firsts.append(f"{clients}: {', '.join(waits)}")
        lines.append(f"| {kind} | {server} | {'; '.join(rates)} | {'; '.join(firsts)} |")
    return "\n".join(lines)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
