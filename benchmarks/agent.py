"""The turns of a coding agent: what each of them reads again, and what its client waits for.

    python benchmarks/agent.py --model FILE
    python benchmarks/agent.py --model FILE --peer "llama-server -m {model} -np 1 --port {port}"
    python benchmarks/agent.py --model FILE --agents 3 --parallel 1

Sends the requests of agent_run.py, whose results are files of this repository, to `edge-spec serve`
and to others that answer OpenAI's API and tell `timings` as llama-server does; each turn goes to
one server after the other, which have the machine for themselves in that time. They are asked
greedily. --agents: several agents with instructions of their own take turns. --no-tools: for models
whose templates take none.

Prints a table in Markdown: of each server tokens of the prompt, how many of them it read,
milliseconds to the first text and to the last, and whether the text is that of ours; then sums.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_models
from agent_run import Turn, agent_run
from common import report
from serve_clients import Server, own_server, peer_server, server_at

_ROOT = Path(__file__).parents[1] / "edge_spec"
_TIMEOUT_S = 600.0
OURS = "ours"


@dataclass(frozen=True)
class Told:
    """What a server came to in one turn."""

    prompt_n: int
    read_n: int
    first_ms: float
    whole_ms: float
    predicted_n: int
    text: str


def files(num_lines: int) -> list[tuple[str, str]]:
    """Beginnings of files of this repository."""
    paths = sorted(_ROOT.glob("engine/*.py"))
    contents = [path.read_text().splitlines()[:num_lines] for path in paths]
    return [
        (f"edge_spec/engine/{path.name}", "\n".join(lines))
        for path, lines in zip(paths, contents, strict=True)
        if len(lines) == num_lines
    ]


def ask(server: Server, path: str, body: dict[str, Any]) -> Told:
    """Raises SystemExit for what is no answer."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_TIMEOUT_S)
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{path}: {response.status} {response.read().decode()[:500]}")
    text, first_ms, timings, usage = "", 0.0, dict[str, Any](), dict[str, Any]()
    for event in _events(response):
        now_ms = (time.perf_counter() - began) * 1e3
        timings = event.get("timings") or timings
        usage = event.get("usage") or usage
        piece = _piece(event)
        if piece:
            first_ms = first_ms or now_ms
            text += piece
    whole_ms = (time.perf_counter() - began) * 1e3
    connection.close()
    if not timings:
        raise SystemExit("the server tells no timings")
    read_n = timings["prompt_n"]
    return Told(
        usage["prompt_tokens"], read_n, first_ms, whole_ms, usage["completion_tokens"], text
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise SystemExit(f"the server ended an answer: {event['error']['message']}")
            yield event


def _piece(event: dict[str, Any]) -> str:
    """Returns what an event adds to the answer: of its text, a thought, or a call."""
    if not event.get("choices"):
        return ""
    choice = event["choices"][0]
    delta = choice.get("delta") or {"content": choice.get("text")}
    found = delta.get("content") or delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        found += (function.get("name") or "") + (function.get("arguments") or "")
    return str(found)


def bodies(arguments: argparse.Namespace) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Returns for each agent what its turns are, and their paths and bodies."""
    turns = agent_run(files(arguments.lines), arguments.turns, thinks=not arguments.no_thoughts)
    found = []
    for agent in range(arguments.agents):
        own = [_as_agent(turn, agent) for turn in turns]
        found.append((f"agent {agent + 1}", [_body(turn, arguments) for turn in own]))
    return found


def _as_agent(turn: Turn, number: int) -> Turn:
    first, *others = turn.messages
    text = f"{first['content']}\nYou are agent number {number + 1}."
    return Turn(turn.what, [{**first, "content": text}, *others], turn.tools)


def _body(turn: Turn, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": arguments.tokens}
    if arguments.no_tools:
        messages = [_without_calls(each) for each in turn.messages]
        return turn.what, {**body, "messages": messages}
    return turn.what, {**body, "messages": list(turn.messages), "tools": list(turn.tools)}


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """As clients write calls and results whose models have no tools."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result:\n{message['content']}"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    text = "\n".join(f"{call['name']} {call['arguments']}" for call in calls)
    return {"role": "assistant", "content": text}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = real_models.named(arguments.model)
    options = ["--drafter", arguments.drafter, "--parallel", str(arguments.parallel)]
    options += ["--context", str(arguments.context)]
    if arguments.threads:
        options += ["--threads", str(arguments.threads)]
    if arguments.runtime:
        options += ["--runtime", arguments.runtime]
    told: dict[str, list[Told]] = {}
    whats = []
    with ExitStack() as opened:
        servers = {OURS: opened.enter_context(own_server(model, options))}
        for command in arguments.peer:
            name = Path(command.split()[0]).name
            filled = command.replace("{model}", model)
            servers[name] = opened.enter_context(peer_server(filled))
        for url in arguments.peer_url:
            servers[url] = server_at(url)
        agents = bodies(arguments)
        for at in range(arguments.turns):
            for name, turns in agents:
                what, body = turns[at]
                whats.append(what if len(agents) == 1 else f"{name} {what}")
                for server, where in servers.items():
                    found = ask(where, "/v1/chat/completions", body)
                    told.setdefault(server, []).append(found)
                print(
                    _line(len(whats), whats[-1], [each[-1] for each in told.values()]), flush=True
                )
    return {"turns": whats, "told": {name: [vars(e) for e in each] for name, each in told.items()}}


def _line(number: int, what: str, turn: Sequence[Told]) -> str:
    cells = [str(number), what]
    for each in turn:
        cells += [str(each.prompt_n), str(each.read_n), f"{each.first_ms:.0f}"]
        cells += [f"{each.whole_ms:.0f}", str(each.predicted_n)]
    cells += ["yes" if each.text == turn[0].text else "no" for each in turn[1:]]
    return f"| {' | '.join(cells)} |"


def heading(names: Sequence[str]) -> str:
    cells = ["turn", ""]
    for name in names:
        cells += [f"{name}: prompt", "read", "first ms", "whole ms", "tokens"]
    cells += [f"text as {name}'s" for name in names[1:]]
    return f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}"


def summary(found: dict[str, Any]) -> str:
    """Returns sums of each server, and of how many turns the texts are equal."""
    lines = []
    ours = found["told"][OURS]
    for name, turns in found["told"].items():
        read, prompt = (sum(turn[key] for turn in turns) for key in ("read_n", "prompt_n"))
        first, whole = (sum(turn[key] for turn in turns) / 1e3 for key in ("first_ms", "whole_ms"))
        equal = sum(turn["text"] == own["text"] for turn, own in zip(turns, ours, strict=True))
        less = sum(turn["read_n"] < own["read_n"] for turn, own in zip(turns, ours, strict=True))
        lines.append(
            f"{name}: {read:,} of {prompt:,} tokens read, {first:.1f} s to first texts, "
            f"{whole:.1f} s in all; {equal} of {len(turns)} texts as ours, read less than ours in "
            f"{less} turns"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a MODEL or a name of real_models.py")
    parser.add_argument("--peer", action="append", default=[], help="a command; {model}, {port}")
    parser.add_argument("--peer-url", action="append", default=[])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--lines", type=int, default=40, help="of each file that is read")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer, at most")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runtime")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--no-tools", action="store_true", help="calls and results as text")
    parser.add_argument("--no-thoughts", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = [Path(command.split()[0]).name for command in arguments.peer]
    print(heading([OURS, *names, *arguments.peer_url]))
    found = measure(arguments)
    print(f"\n{summary(found)}")
    report(found, arguments.out)


if __name__ == "__main__":
    main()
