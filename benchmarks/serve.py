"""The server under load: many clients at once, with servers of other projects beside it.

    python benchmarks/serve.py alone
    python benchmarks/serve.py table --model FILE --peer "llama-server -m {model} --port {port}"
    python benchmarks/serve.py stall --peer "llama-server -m {model} -t 2 -np 8 --port {port}"
    python benchmarks/serve.py table --clients 4,8 --kinds short --peer-url http://127.0.0.1:8081

Servers run in processes of their own and are asked greedily; clients share the machine's cores with
them. Linux only.

`alone`: one client and the SDK in turns: time a token, from an answer's first text to its last,
medians over prompts and rounds, and their ratio.

`table`: tokens a second of 1, 2, 4 and 8 clients together, from the first request to the last text,
time to the first text, peak memory, and how many texts equal those that a server writes for one
client alone: ours `auto` (drafting) and `plain`, both held against plain texts, and others against
their own. Servers take turns in each row, another one first in each of --repeats. A long prompt is
asked once of each, so that no cache knows it; those of kind `alike` are the same but for their last
sentence. Prints the table as Markdown, and how many times as fast ours is. Rows that are chosen by
--clients, --long-clients and --kinds can be measured by themselves; --quick leaves out what takes
longest, about 6 minutes with --repeats 2.

`stall`: what --writers wait for their next text, and write, while a prompt of --long-tokens that
came in between is read.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import real_models
import serve_stall
import serve_table
from common import open_engine, report
from serve_clients import (
    Answer,
    Server,
    ask,
    own_server,
    peer_server,
    server_at,
    short_prompts,
    token_ms,
)

from edge_spec.engine.engine import Engine

DRAFTERS = {"auto": "auto", "plain": "none"}  # of our servers in the table


def ask_sdk(engine: Engine, prompt: str, max_tokens: int) -> Answer:
    began = time.perf_counter()
    generation = engine.chat(prompt, max_tokens=max_tokens, stream=True)
    times = [time.perf_counter() for chunk in generation if chunk.text]
    result = generation.result
    return Answer(result.text, result.stats.predicted_n, began, tuple(times))


def alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """The SDK and a client of the server in turns, after one round of each that does not count."""
    sdk: list[Answer] = []
    client: list[Answer] = []
    prompts = short_prompts(arguments.num_prompts)
    options = {"drafter": arguments.drafter, "threads": arguments.threads}
    with open_engine(arguments.model, **options) as engine, own(arguments) as server:
        for number in range(arguments.rounds + 1):
            for prompt in prompts:
                ours = ask_sdk(engine, prompt, arguments.tokens)
                asking = ask(server, prompt, arguments.tokens, session_id="alone")  # one cache
                theirs = asyncio.run(asking)
                if number:
                    sdk.append(ours)
                    client.append(theirs)
    found = {"sdk_token_ms": token_ms(sdk), "client_token_ms": token_ms(client)}
    ratio = found["client_token_ms"] / found["sdk_token_ms"]
    print(
        f"{found['sdk_token_ms']:.2f} ms a token from the SDK, {found['client_token_ms']:.2f} from "
        f"the server, {ratio:.3f}x"
    )
    return {"alone": {**found, "ratio": ratio}}


def table(arguments: argparse.Namespace) -> dict[str, Any]:
    arms: dict[str, serve_table.Opens] = {
        arm: partial(own, arguments, drafter) for arm, drafter in DRAFTERS.items()
    }
    arms |= peers(arguments)
    alone_as = {arm: "plain" if arm in DRAFTERS else arm for arm in arms}
    if arguments.quick:
        del alone_as["plain"]
    plan = serve_table.Plan(
        counts(arguments.clients),
        counts(arguments.long_clients or ("1,4" if arguments.quick else arguments.clients)),
        arguments.kinds.split(","),
        arguments.repeats,
        arguments.tokens,
        arguments.answers,
        arguments.long_tokens,
    )
    if unknown := set(plan.kinds) - set(serve_table.KINDS):
        raise SystemExit(f"--kinds knows {', '.join(serve_table.KINDS)}, not {unknown.pop()}")
    found = serve_table.measure(arms, alone_as, plan)
    print(serve_table.markdown(found["cells"], "auto"))
    print(serve_table.ratios(found["cells"], "auto"), flush=True)
    return {"table": found}


def stall(arguments: argparse.Namespace) -> dict[str, Any]:
    arms: dict[str, serve_stall.Opens] = {"ours": partial(own, arguments, "auto")}
    arms |= peers(arguments)
    plan = serve_stall.Plan(
        arguments.writers, arguments.tokens, arguments.long_tokens, arguments.after
    )
    found = serve_stall.measure(arms, plan)
    print(serve_stall.markdown(found), flush=True)
    return {"stall": found}


def counts(text: str) -> list[int]:
    return sorted(int(count) for count in text.split(","))


def own(
    arguments: argparse.Namespace, drafter: str | None = None
) -> AbstractContextManager[Server]:
    options = ["--drafter", drafter or arguments.drafter, "--parallel", str(arguments.parallel)]
    if arguments.threads:
        options += ["--threads", str(arguments.threads)]
    if arguments.runtime:
        options += ["--runtime", arguments.runtime]
    return own_server(real_models.named(arguments.model), options)


def peers(arguments: argparse.Namespace) -> dict[str, serve_table.Opens]:
    """Returns the servers of others by the name of their program, or by their address."""
    found: dict[str, Callable[[], AbstractContextManager[Server]]] = {}
    for command in arguments.peer:
        words = command.replace("{model}", real_models.named(arguments.model))
        found[Path(command.split()[0]).name] = partial(peer_server, words)
    for url in arguments.peer_url:
        found[url] = partial(nullcontext, server_at(url))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for run, parallel, tokens in ((alone, 4, 64), (table, 8, 64), (stall, 8, 256)):
        command = commands.add_parser(run.__name__)
        command.add_argument("--model", default="smollm2")
        command.add_argument("--runtime")
        command.add_argument("--threads", type=int)
        command.add_argument("--parallel", type=int, default=parallel, help="slots of our servers")
        command.add_argument("--tokens", type=int, default=tokens, help="of an answer")
        command.add_argument("--json", type=Path)
        command.set_defaults(run=run)
        if run is not alone:
            command.add_argument("--long-tokens", type=int, default=1500)
            command.add_argument(
                "--peer", action="append", default=[], help="a command with {port} and {model}"
            )
            command.add_argument("--peer-url", action="append", default=[], help="of one that runs")
    of_alone, of_table, of_stall = commands.choices.values()
    of_alone.add_argument("--drafter", default="auto")
    of_alone.add_argument("--num-prompts", type=int, default=12)
    of_stall.add_argument("--writers", type=int, default=3)
    of_stall.add_argument("--after", type=float, default=3.0, help="seconds, the long prompt comes")
    of_alone.add_argument("--rounds", type=int, default=3)
    of_table.add_argument("--clients", default="1,2,4,8")
    of_table.add_argument("--long-clients", help="as --clients, of long prompts")
    of_table.add_argument(
        "--quick", action="store_true", help="without plain, long prompts of 1 and 4 clients"
    )
    of_table.add_argument("--kinds", default=",".join(serve_table.KINDS))
    of_table.add_argument("--repeats", type=int, default=1, help="of rows of short prompts")
    of_table.add_argument("--answers", type=int, default=16, help="short ones of all clients")
    arguments = parser.parse_args()
    report(arguments.run(arguments), arguments.json)


if __name__ == "__main__":
    main()
