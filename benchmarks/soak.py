"""Hours of mixed requests: do answers stay the same, do memory, handles and threads stay flat?

    python benchmarks/soak.py
    python benchmarks/soak.py --minutes 2 --json soak.json
    python benchmarks/soak.py --draft smollm2 --draft-runtime llamacpp

Two processes with the same model and a small context, so that its limit is met often: one asks the
SDK, in the default mode and in exact mode, the other is `edge-spec serve`. They are asked in turns,
so that the load is one of a time: greedily and with seeds, streamed and not, with JSON schemas,
prompts at the end of the context and beyond it, conversations that grow until it is full, drafters
changed in the middle of an answer, cancelled answers, clients that leave, two clients at once,
snapshots, forks. An answer has to equal the first one that the same request got, from whichever
process and in whichever way. Errors are what was refused and should not have been, or the reverse.

Memory is the resident memory of both processes; the first half of the time is warm-up, in which
each slot and engine comes to hold its longest text. Growth is from the median of the fifth of the
samples after it to the median of the last fifth. The JSON file is written
every minute, so that a run that is ended leaves its figures. Exit status 1 where an answer differs,
an error came, or something grew. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import machine
from soak_askers import DRAFTERS, DRAFTERS_OF_PAIR, HttpAsker, Outcome

from edge_spec.storage.atomic import atomic_file

SAMPLE_S = 5.0
WRITE_S = 60.0
MAX_GROWTH = 0.02  # of resident memory: allocators never give all back
KEPT = 20  # errors and differing answers that the report quotes
# A server that ends with this process, however that ends: its standard input closes.
SERVER = """
import os, signal, sys, threading
def watch():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
from edge_spec.cli.start import main
sys.argv[0] = "edge-spec"
main()
"""


@dataclass(frozen=True)
class Usage:
    """Holds what one process uses, at a time in seconds since the start."""

    at_s: float
    memory_bytes: int
    handles: int
    threads: int


@dataclass
class Tally:
    """Counts what came of the requests so far."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    differing: list[dict[str, str]] = field(default_factory=list)
    num_differing: Counter[bool] = field(default_factory=Counter)  # by whether it is sampled
    first: dict[str, str] = field(default_factory=dict)

    def take(self, source: str, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.requests[f"{source}: {outcome.kind}"] += 1
            if outcome.error is not None:
                self.errors.append(f"{source}: {outcome.kind}: {outcome.error}")
            if outcome.key is None:
                continue
            first = self.first.setdefault(outcome.key, outcome.text)
            if first != outcome.text:
                self.num_differing[outcome.sampled] += 1
                where = {"source": source, "kind": outcome.kind, "request": outcome.key}
                if len(self.differing) < KEPT:
                    self.differing.append({**where, "first": first, "now": outcome.text})


def usage(pid: int, began: float) -> Usage:
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return Usage(
        time.monotonic() - began,
        int(values["VmRSS"].split()[0]) * 1024,
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        int(values["Threads"]),
    )


@contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def next_line(process: subprocess.Popen[str]) -> Any:
    """Returns what the next line of a child says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"soak: a process ended with status {process.wait()}")
    return json.loads(line)


def ask_sdk(process: subprocess.Popen[str], number: int) -> list[Outcome]:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    return [Outcome(**each) for each in next_line(process)]


def growth(samples: list[Usage], until_s: float) -> dict[str, Any]:
    """Returns the growth of one process, after the first half of the time."""
    warm = [each for each in samples if each.at_s >= until_s / 2] or samples
    window = max(1, len(warm) // 5)
    first, last = warm[:window], warm[-window:]
    times = [each.at_s / 3600 for each in warm]
    memory = [each.memory_bytes for each in warm]
    slope = float(np.polyfit(times, memory, 1)[0]) if len(warm) > 2 else 0.0
    start, end = median(memory[:window]), median(memory[-window:])
    return {
        "memory_start_bytes": int(start),
        "memory_end_bytes": int(end),
        "memory_most_bytes": max(memory),
        "memory_growth": end / start - 1,
        "memory_fit_bytes_an_hour": slope,
        "handles_start": int(median(each.handles for each in first)),
        "handles_end": int(median(each.handles for each in last)),
        "threads_start": int(median(each.threads for each in first)),
        "threads_end": int(median(each.threads for each in last)),
    }


def summary(tally: Tally, samples: dict[str, list[Usage]], elapsed_s: float) -> dict[str, Any]:
    """Sums over the processes, and each by itself."""
    each = {name: growth(found, elapsed_s) for name, found in samples.items()}
    total = {
        name: sum(found[name] for found in each.values())
        for name in next(iter(each.values()))
        if name != "memory_growth"
    }
    total["memory_growth"] = total["memory_end_bytes"] / total["memory_start_bytes"] - 1
    return {
        "minutes": elapsed_s / 60,
        "requests": sum(tally.requests.values()),
        "errors": len(tally.errors),
        "differing": tally.num_differing[False],
        "differing_sampled": tally.num_differing[True],
        **total,
        "passed": passed(tally, list(each.values())),
        "processes": each,
        "memory_bytes_by_minute": _by_minute(samples),
        "requests_by_kind": dict(tally.requests),
        "compared_requests": len(tally.first),
        "error_texts": tally.errors[:KEPT],
        "differing_answers": tally.differing,
    }


def _by_minute(samples: dict[str, list[Usage]]) -> dict[str, list[int]]:
    step = max(1, int(WRITE_S / SAMPLE_S))
    return {name: [each.memory_bytes for each in found[::step]] for name, found in samples.items()}


def passed(tally: Tally, processes: list[dict[str, Any]]) -> bool:
    return (
        not tally.errors
        and not tally.differing
        and all(
            found["memory_growth"] <= MAX_GROWTH
            and found["handles_end"] <= found["handles_start"]
            and found["threads_end"] <= found["threads_start"]
            for found in processes
        )
    )


def write(found: dict[str, Any], out: Path | None) -> None:
    """Whole or not at all."""
    if out is None:
        return
    with atomic_file(out) as file:
        file.write_text(json.dumps(found, indent=2) + "\n")


def run(arguments: Namespace) -> dict[str, Any]:
    context, threads = str(arguments.context), str(arguments.threads)
    pair = ["--draft", arguments.draft, "--draft-runtime", arguments.draft_runtime]
    pair = pair if arguments.draft else []
    serve = ["serve", arguments.model, "--json", "--port", "0", "--parallel", "2", *pair]
    with ExitStack() as opened:
        sdk = opened.enter_context(child(["soak_sdk.py", arguments.model, context, threads, *pair]))
        next_line(sdk)
        server = opened.enter_context(
            child(["-c", SERVER, *serve, "--context", context, "--threads", threads])
        )
        drafters = DRAFTERS_OF_PAIR if pair else DRAFTERS
        asker = HttpAsker(next_line(server)["port"], drafters)
        pids = {"sdk": sdk.pid, "server": server.pid}
        samples: dict[str, list[Usage]] = {name: [] for name in pids}
        where, tally, began = machine(), Tally(), time.monotonic()
        sampled_s, written_s, elapsed_s = -SAMPLE_S, 0.0, 0.0
        try:
            for number in count():
                elapsed_s = time.monotonic() - began
                if elapsed_s - sampled_s >= SAMPLE_S:
                    sampled_s = elapsed_s
                    for name, pid in pids.items():
                        samples[name].append(usage(pid, began))
                if elapsed_s - written_s >= WRITE_S:
                    written_s = elapsed_s
                    found = summary(tally, samples, elapsed_s)
                    write({"machine": where, **found}, arguments.json)
                    print(line(found), file=sys.stderr, flush=True)
                if elapsed_s >= arguments.minutes * 60:
                    break
                tally.take("sdk", ask_sdk(sdk, number))
                tally.take("server", asker.step(number))
        except KeyboardInterrupt:
            pass
        found = summary(tally, samples, elapsed_s)
        write({"machine": where, **found}, arguments.json)
        return found


def line(found: dict[str, Any]) -> str:
    return (
        "soak: {minutes:.0f} min, {requests} requests, {errors} errors, {differing} differing; "
        "memory {memory_growth:+.1%} ({memory_fit_bytes_an_hour:+.0f} bytes an hour), "
        "handles {handles_start} to {handles_end}, threads {threads_start} to {threads_end}"
    ).format(**found)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft")
    parser.add_argument("--draft-runtime", default="auto")
    parser.add_argument("--json", type=Path)
    found = run(parser.parse_args())
    print(line(found))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
