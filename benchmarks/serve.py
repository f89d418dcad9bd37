"""The server under load: many clients at once, with servers of other projects beside it.

    python benchmarks/serve.py alone
    python benchmarks/serve.py table --model FILE --peer "llama-server -m {model} --port {port}"
    python benchmarks/serve.py stall --peer "llama-server -m {model} -t 2 -np 8 --port {port}"
    python benchmarks/serve.py crowd --clients 64 --minutes 10
    python benchmarks/serve.py table --clients 4,8 --kinds short --peer-url http://127.0.0.1:8081
    python benchmarks/serve.py kinds --model coder-1.5b --own "draft=--draft coder-0.5b" \\
        --peer "llama-server -m {model} -t 2 -np 1 --metrics --port {port}" --kept answers.jsonl

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

`kinds`: one client's answers to prompts of several kinds, those of held_out.jsonl unless --prompts
says otherwise: 12 that ask for code, 12 for a change of given code, 12 for an explanation, and 12
others, which no training of ours saw. Every server answers a prompt before the next one: ours with
the options of each --own NAME=OPTIONS (without one and without --peer-url: plain, suffix and auto),
and those of --peer NAME=COMMAND and --peer-url NAME=URL, which may be ours, too. Prints
rates by kind, over those of --base, and the least of answers that have more than 60 tokens; whether
texts are those of --base, and of our plain decoding if an arm is called `plain`; and how many
rounds that drafted had 1, 2, 3 and 4 right draft tokens at least. Answers are kept in --kept:
the same command goes on where it ended, and --seconds ends it early (0: prints what there is).

`stall`: what --writers wait for their next text, and write, while a prompt of --long-tokens that
came in between is read.

`crowd`: many clients for minutes, one in ten of which leaves in the middle of an answer: whether
each text is that of a client alone without drafting, errors, and whether memory stays level.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import real_models
import serve_crowd
import serve_kinds
import serve_stall
import serve_table
from common import open_engine, read_prompts, report
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
OWN_ARMS = ("plain=--drafter none", "suffix=--drafter suffix", "auto=")  # of `kinds`
HELD_OUT = Path(__file__).with_name("held_out.jsonl")


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


def crowd(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = serve_crowd.Plan(
        arguments.clients, arguments.prompts, arguments.tokens, arguments.minutes
    )
    found = serve_crowd.measure(partial(own, arguments), partial(own, arguments, "none"), plan)
    print(serve_crowd.summary(found), flush=True)
    return {"crowd": found}


def kinds(arguments: argparse.Namespace) -> dict[str, Any]:
    arms: dict[str, serve_table.Opens] = peers(arguments)
    base = arguments.base or next(iter(arms), "plain")
    for own_arm in arguments.own or (() if arguments.peer_url else OWN_ARMS):
        name, _, options = own_arm.partition("=")
        arms[name] = partial(own_with, arguments, options)
    if base not in arms:
        raise SystemExit(f"--base is one of {', '.join(arms)}, not {base}")
    prompts = read_prompts(arguments.prompts, arguments.per_category)
    plan = serve_kinds.Plan(
        prompts, arguments.tokens, arguments.repeats, arguments.seconds, arguments.kept
    )
    found = serve_kinds.figures(serve_kinds.measure(arms, plan), prompts, base)
    print(serve_kinds.markdown(found), flush=True)
    return {"kinds": found}


def counts(text: str) -> list[int]:
    return sorted(int(count) for count in text.split(","))


def own(
    arguments: argparse.Namespace, drafter: str | None = None
) -> AbstractContextManager[Server]:
    options = ["--drafter", drafter or arguments.drafter, "--parallel", str(arguments.parallel)]
    options += ["--queue-timeout", "600"]
    if arguments.threads:
        options += ["--threads", str(arguments.threads)]
    if arguments.runtime:
        options += ["--runtime", arguments.runtime]
    return own_server(real_models.named(arguments.model), options)


def own_with(arguments: argparse.Namespace, options: str) -> AbstractContextManager[Server]:
    """Opens a server of ours, of one slot; options: of `edge-spec serve`, where a model may be one
    of real_models.py."""
    words = [
        real_models.named(word) if word in real_models.MODELS else word
        for word in shlex.split(options)
    ]
    threads = ["--threads", str(arguments.threads)] if arguments.threads else []
    runtime = ["--runtime", arguments.runtime] if arguments.runtime else []
    slots = ["--parallel", str(arguments.parallel)]
    return own_server(real_models.named(arguments.model), [*slots, *threads, *runtime, *words])


def peers(arguments: argparse.Namespace) -> dict[str, serve_table.Opens]:
    """Returns the servers of others by their names, which are those of their programs, or their
    addresses, where none is given as NAME=."""
    found: dict[str, Callable[[], AbstractContextManager[Server]]] = {}
    for asked in arguments.peer:
        name, command = named_peer(asked, Path(asked.split()[0]).name)
        words = command.replace("{model}", real_models.named(arguments.model))
        found[name] = partial(peer_server, words)
    for asked in arguments.peer_url:
        name, url = named_peer(asked, asked)
        found[name] = partial(nullcontext, server_at(url))
    return found


def named_peer(asked: str, name: str) -> tuple[str, str]:
    """Takes NAME=WHAT apart; name: of what has none."""
    given = re.match(r"([\w.-]+)=(.+)", asked)
    return (given[1], given[2]) if given else (name, asked)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    defaults = ((alone, 4, 64), (table, 8, 64), (stall, 8, 256), (crowd, 8, 64), (kinds, 1, 256))
    for run, parallel, tokens in defaults:
        command = commands.add_parser(run.__name__)
        command.add_argument("--model", default="smollm2")
        command.add_argument("--runtime")
        command.add_argument("--threads", type=int)
        command.add_argument("--parallel", type=int, default=parallel, help="slots of our servers")
        command.add_argument("--tokens", type=int, default=tokens, help="of an answer")
        command.add_argument("--json", type=Path)
        command.set_defaults(run=run)
        if run not in (alone, crowd):
            command.add_argument(
                "--peer", action="append", default=[], help="a command with {port} and {model}"
            )
            command.add_argument("--peer-url", action="append", default=[], help="of one that runs")
        if run in (table, stall):
            command.add_argument("--long-tokens", type=int, default=1500)
    of_alone, of_table, of_stall, of_crowd, of_kinds = commands.choices.values()
    for own_alone in (of_alone, of_crowd):
        own_alone.add_argument("--drafter", default="auto")
    of_crowd.add_argument("--clients", type=int, default=64)
    of_crowd.add_argument("--prompts", type=int, default=24)
    of_crowd.add_argument("--minutes", type=float, default=10.0)
    of_alone.add_argument("--num-prompts", type=int, default=12)
    of_stall.add_argument("--writers", type=int, default=3)
    of_stall.add_argument("--after", type=float, default=3.0, help="seconds, the long prompt comes")
    of_alone.add_argument("--rounds", type=int, default=3)
    of_kinds.add_argument(
        "--own", action="append", help="NAME=OPTIONS of one of our servers; may be repeated"
    )
    of_kinds.add_argument("--base", help="the arm that rates are held against; the first peer")
    of_kinds.add_argument("--prompts", type=Path, default=HELD_OUT)
    of_kinds.add_argument("--per-category", type=int)
    of_kinds.add_argument("--repeats", type=int, default=1)
    of_kinds.add_argument("--seconds", type=float, help="after which no further prompt is begun")
    of_kinds.add_argument("--kept", type=Path, help="JSON lines of answers, which is gone on with")
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
