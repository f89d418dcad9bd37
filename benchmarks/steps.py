"""Plain steps and prompts through our sessions, beside llama.cpp's own loop with its own kernels.

    python benchmarks/steps.py coder-1.5b
    python benchmarks/steps.py --shape 7B --layers 16 --type Q4_K

Each side has a process of its own with the model loaded, and is asked in turns: for passes of one
token after so many others, and for prompts. Tokens are random. Prints milliseconds a step and
tokens a second of prompts, medians over rounds, and how many times as fast ours is. A model of
random weights has as many layers as --layers says, which is printed with the figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import real_models
from common import report
from random_gguf import SHAPES, write_random

SIDES = ("ours", "llama.cpp")


class Loop(Protocol):
    """One conversation of either side."""

    def read(self, num_tokens: int) -> None:
        """Reads that many tokens from the beginning on."""

    def step(self) -> None:
        """Scores one token more."""

    def go_back(self, length: int) -> None: ...


class Ours:
    def __init__(self, path: str, threads: int | None) -> None:
        from edge_spec.core.model import RuntimeOptions
        from edge_spec.models import runtimes

        source = runtimes.open_model_info(Path(path))
        options = RuntimeOptions(threads=threads, providers=("cpu",))
        self._model = runtimes.load_runtime("llamacpp").open(source, options)
        self._tokens = Tokens(self._model.config.vocab_size)
        self._session = self._model.open_session()

    def read(self, num_tokens: int) -> None:
        self._session.rollback(0)
        self._session.prefill(self._tokens.draw(num_tokens))

    def step(self) -> None:
        from edge_spec.core.tree import TokenTree

        self._session.forward(TokenTree.chain(self._tokens.draw(1)[0]))
        self._session.commit([0])

    def go_back(self, length: int) -> None:
        self._session.rollback(length)


class Theirs:
    def __init__(self, path: str, threads: int | None, num_tokens: int) -> None:
        from llama_loop import LlamaLoop

        from edge_spec.placement.machine import available_cores

        self._loop = LlamaLoop(path, False, threads or available_cores(), num_tokens)
        self._tokens = Tokens(self._loop.vocab_size)

    def read(self, num_tokens: int) -> None:
        self._loop.truncate(0)
        self._loop.forward(self._tokens.draw(num_tokens), all_rows=False)

    def step(self) -> None:
        self._loop.forward(self._tokens.draw(1), all_rows=False)

    def go_back(self, length: int) -> None:
        self._loop.truncate(length)


class Tokens:
    def __init__(self, vocab_size: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocab_size = vocab_size

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, self._vocab_size, count).tolist()
        return drawn


def serve(side: str, arguments: argparse.Namespace) -> None:
    """Answers lines of "prompt LENGTH" and "steps LENGTH COUNT" with seconds."""
    longest = max(*counts(arguments.lengths), *counts(arguments.prompts)) + arguments.steps + 8
    ours = side == SIDES[0]
    loop: Loop = (
        Ours(arguments.model, arguments.threads)
        if ours
        else Theirs(arguments.model, arguments.threads, longest)
    )
    at = -1  # tokens that it has read
    print("ready", flush=True)
    for line in sys.stdin:
        kind, length, *rest = line.split()
        seconds = []
        if kind == "steps":
            if at != int(length):
                loop.read(int(length))
                at = int(length)
                loop.step()
            loop.go_back(at)
            for _ in range(int(rest[0])):
                began = time.perf_counter()
                loop.step()
                seconds.append(time.perf_counter() - began)
            loop.go_back(at)
        else:
            at = -1
            began = time.perf_counter()
            loop.read(int(length))
            seconds = [time.perf_counter() - began]
        print(*seconds, flush=True)


class Side:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, line: str) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a side has ended")
        return [] if answer == "ready\n" else [float(each) for each in answer.split()]


@contextmanager
def started(side: str, arguments: argparse.Namespace) -> Iterator[Side]:
    command = [sys.executable, __file__, arguments.model, "--serve", side]
    for name in ("lengths", "prompts", "steps", "threads"):
        value = getattr(arguments, name)
        command += [f"--{name}", str(value)] if value is not None else []
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with closing(process.stdin), process:  # type: ignore[type-var]
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"{side} does not start")
        yield Side(process)
        assert process.stdin is not None
        process.stdin.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as opened:
        sides = {side: opened.enter_context(started(side, arguments)) for side in SIDES}
        found: dict[str, Any] = {}
        for length in counts(arguments.prompts):
            asked = [f"prompt {length}"] * (arguments.rounds + 1)
            times = in_turns(sides, asked)
            rates = {side: length / median(each[1:]) for side, each in times.items()}
            found[f"prompt {length}"] = rates
            line = ", ".join(f"{side} {rate:.0f} tokens/s" for side, rate in rates.items())
            print(f"prompt {length}: {line}, {rates['ours'] / rates['llama.cpp']:.2f}x", flush=True)
        for length in counts(arguments.lengths):
            asked = [f"steps {length} {arguments.steps}"] * arguments.rounds
            times = in_turns(sides, asked)
            ms = {side: 1e3 * median(each) for side, each in times.items()}
            found[f"step {length}"] = ms
            line = ", ".join(f"{side} {each:.2f} ms" for side, each in ms.items())
            print(f"step {length}: {line}, {ms['llama.cpp'] / ms['ours']:.2f}x", flush=True)
    return found


def in_turns(sides: dict[str, Side], asked: list[str]) -> dict[str, list[float]]:
    """Returns the seconds of each side, which go first by turns."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number, line in enumerate(asked):
        for side in sorted(sides, reverse=bool(number % 2)):
            times[side] += sides[side].ask(line)
    return times


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a GGUF file, or one of real_models.py")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in place of a model")
    parser.add_argument("--layers", type=int, help="of random weights; all by default")
    parser.add_argument("--type", default="Q4_K", help="of random weights")
    parser.add_argument("--lengths", default="64,2048,8192", help="tokens before a step")
    parser.add_argument("--prompts", default="512,2048", help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=24, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments)
        return
    if (arguments.model is None) == (arguments.shape is None):
        raise SystemExit("give a GGUF file or --shape")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape:
            arguments.model = str(Path(folder) / "random.gguf")
            shape = SHAPES[arguments.shape]
            write_random(Path(arguments.model), shape, arguments.type, arguments.layers)
            layers = min(arguments.layers or shape.layers, shape.layers)
            print(f"{arguments.shape}, {layers} of {shape.layers} layers, {arguments.type}")
        else:
            arguments.model = real_models.named(arguments.model)
        report({"steps": measure(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
