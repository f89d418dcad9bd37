"""Code between two texts: our server beside llama-server, on this repository's own files.

    python benchmarks/infill.py places --model FILE --peer "llama-server -m {model} --port {port}"
    python benchmarks/infill.py keystrokes --model FILE --peer "llama-server ..."

The peer is asked for the same texts by its /infill. It cuts a prompt to its batch, and other files
to what its context has beside it: give it `-c 8192 -b 4096 -np 1`, and as many threads as ours has.
All is greedy, and the sides take turns.

`places`: files are cut at places that a seed draws, of three kinds: `line`, some lines after the
end of one; `middle`, the rest of a line; `body`, a function without its body. Prints by kind the
time of the whole completion, from the request to the last token, of that the time of writing, the
share of draft tokens that were accepted, how many first lines are those of the file (`right`), and
how many texts are equal. Our server drafts (`auto`) or not (`plain`). With --files, each prompt has
that many other files of the same folder before it; with --suffix-first, ours has the other order.

`keystrokes`: a line is typed, a few letters a request, as editors ask: tokens that each request
reads, and its time, for either order of the texts. A prompt that ends with the suffix has all of it
read again with each letter; one that ends with the prefix only the letters. The side `remember`
drafts from what earlier requests wrote, too, which stays in the cache until `edge-spec learn
forget`.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import real_models
from common import report
from infill_places import ROOT, Place, places, typed
from serve_clients import Server, own_server, peer_server

OURS = {"auto": [], "plain": ["--drafter", "none"], "remember": ["--remember"]}
_TIMEOUT_S = 600.0


def ask(server: Server, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Returns the answer, and the milliseconds that it took."""
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}/infill",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        told = json.load(response)
    return told, (time.perf_counter() - began) * 1e3


def open_sides(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Server]:
    model = real_models.named(arguments.model)
    options = ["--parallel", "1", "--context", str(arguments.context)]
    if arguments.threads:
        options += ["--threads", str(arguments.threads)]
    sides = {
        side: stack.enter_context(own_server(model, [*options, *OURS[side]]))
        for side in arguments.sides.split(",")
    }
    if arguments.peer:
        sides["peer"] = stack.enter_context(peer_server(arguments.peer.replace("{model}", model)))
    return sides


def measure_places(arguments: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = open_sides(arguments, stack)
        for number, place in enumerate(places(arguments.count, arguments.seed)):
            body, told = place.body(arguments), {}
            names = list(sides)
            for side in names[number % len(names) :] + names[: number % len(names)]:
                first = arguments.suffix_first and side != "peer"
                answer, took_ms = ask(sides[side], body | ({"spm_infill": True} if first else {}))
                told[side] = {
                    "text": answer["content"],
                    "is_right": place.is_right(answer["content"]),
                    "whole_ms": took_ms,
                    "write_ms": answer["timings"]["predicted_ms"],
                    "read_n": answer["timings"]["prompt_n"],
                    "prompt_n": answer["tokens_evaluated"],
                    "write_n": answer["tokens_predicted"],
                    "draft_n": answer["timings"].get("draft_n", 0),
                    "draft_n_accepted": answer["timings"].get("draft_n_accepted", 0),
                }
            rows.append(
                {"kind": place.kind, "file": str(place.path.relative_to(ROOT)), "sides": told}
            )
            _print_row(rows[-1])
            if len({each["prompt_n"] for each in told.values()}) > 1:
                print("the sides had other prompts: give the peer a larger batch or context")
    print(markdown(rows))
    return {"places": rows}


def _print_row(row: dict[str, Any]) -> None:
    shown = " ".join(
        f"{side} {told['whole_ms']:.0f} ({told['write_ms']:.0f}, {told['write_n']} tokens)"
        for side, told in row["sides"].items()
    )
    print(f"{row['kind']} {row['file']}: {shown}", flush=True)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Returns sums of each kind as a table; ratios: how many times as fast `auto` is."""
    sides = list(rows[0]["sides"])
    others = [side for side in sides if side != "auto"]
    head = ["kind", "places"]
    head += [f"{side}: whole, writing (s)" for side in sides]
    head += [f"x {side}: whole, writing" for side in others]
    head += ["accepted of drafted", "right", *(f"equal texts: {side}" for side in others)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for kind in (*dict.fromkeys(row["kind"] for row in rows), "all"):
        of_kind = [row["sides"] for row in rows if kind in (row["kind"], "all")]
        sums = {
            side: [sum(each[side][name] for each in of_kind) for name in ("whole_ms", "write_ms")]
            for side in sides
        }
        cells = [kind, str(len(of_kind))]
        cells += [f"{sums[side][0] / 1e3:.1f}, {sums[side][1] / 1e3:.1f}" for side in sides]
        cells += [
            ", ".join(
                f"{theirs / ours:.2f}"
                for theirs, ours in zip(sums[side], sums["auto"], strict=True)
            )
            for side in others
        ]
        drafted = [
            sum(each["auto"][n] for each in of_kind) for n in ("draft_n_accepted", "draft_n")
        ]
        cells.append(f"{drafted[0]}/{drafted[1]}")
        cells.append(f"{sum(each['auto']['is_right'] for each in of_kind)}/{len(of_kind)}")
        cells += [
            f"{sum(each[side]['text'] == each['auto']['text'] for each in of_kind)}/{len(of_kind)}"
            for side in others
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure_keystrokes(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = [place for place in places(arguments.count, arguments.seed) if place.kind == "line"]
    asks: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        sides = open_sides(arguments, stack)
        arms = [*((side, False) for side in sides), *([("auto", True)] if "auto" in sides else [])]
        for side, first in arms:
            found = asks.setdefault(f"{side}, {'suffix' if first else 'prefix'} first", [])
            for place in chosen:
                for number, (before, line, after) in enumerate(typed(place, arguments.step)):
                    body = Place("line", place.path, before, after, "").body(arguments)
                    body |= {"prompt": line, **({"spm_infill": True} if first else {})}
                    answer, took_ms = ask(sides[side], body)
                    if number:
                        timings = answer["timings"]
                        figures = [timings["prompt_n"], answer["tokens_evaluated"], took_ms]
                        figures += [timings["predicted_ms"], timings.get("draft_n_accepted", 0)]
                        found.append(figures)
    head = [
        "side",
        "requests",
        "tokens of a prompt",
        "tokens read",
        "ms a request",
        "ms of writing",
    ]
    print("| " + " | ".join([*head, "accepted draft tokens"]) + " |\n" + "|---" * 7 + "|")
    for arm, found in asks.items():
        read, whole, took, written, accepted = (median(each) for each in zip(*found, strict=True))
        print(
            f"| {arm} | {len(found)} | {whole:.0f} | {read:.0f} | {took:.0f} | {written:.0f} "
            f"| {accepted:.0f} |"
        )
    return {"keystrokes": asks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for run, name, count, tokens in (
        (measure_places, "places", 4, 64),
        (measure_keystrokes, "keystrokes", 2, 16),
    ):
        command = commands.add_parser(name)
        command.add_argument("--model", required=True)
        command.add_argument("--peer", help="a command with {port} and {model}")
        command.add_argument("--sides", default="auto,plain", help="of ours: auto, plain, remember")
        command.add_argument("--threads", type=int)
        command.add_argument("--context", type=int, default=8192)
        command.add_argument("--count", type=int, default=count, help="places of each kind")
        command.add_argument("--seed", type=int, default=7)
        command.add_argument("--tokens", type=int, default=tokens, help="of a completion")
        command.add_argument("--prefix-lines", type=int, default=64)
        command.add_argument("--suffix-lines", type=int, default=16)
        command.add_argument("--files", type=int, default=0, help="others before each prompt")
        command.add_argument("--json", type=Path)
        command.set_defaults(run=run)
    commands.choices["places"].add_argument("--suffix-first", action="store_true")
    commands.choices["keystrokes"].add_argument("--step", type=int, default=3)
    arguments = parser.parse_args()
    report(arguments.run(arguments), arguments.json)


if __name__ == "__main__":
    main()
