"""Answer prompts in turns with and without drafting.

llama-server takes part if it is on the PATH, with the same GGUF file. Its counts and times are of
decoding alone: from the answer's first token, which the prefill gives, to the last.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Progress
from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.report_files import describe_error
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import GREEDY
from edge_spec.errors import ContextFullError
from edge_spec.text.prompt_files import Prompt

DRAFTING, PLAIN = "drafting", "plain"  # our own sides
_WARM_UP = "Count from one to ten."
_WARM_UP_TOKENS = 8
_DRAFT_TOKENS = 32


@dataclass(frozen=True)
class Run:
    """One answer. Counts and times exclude the prompt."""

    tokens: tuple[int, ...]
    stats: Stats

    @property
    def num_tokens(self) -> int:
        return self.stats.predicted_n

    @property
    def seconds(self) -> float:
        return self.stats.predicted_ms / 1e3


Answer = Callable[[Sequence[int], int], Run]  # arguments: a prompt's tokens, max_tokens


@dataclass(frozen=True)
class Side:
    """A way of decoding."""

    name: str
    answer: Answer


def own_sides(engine: Engine, sampling: SamplingParams = GREEDY) -> list[Side]:
    """Return an engine with its drafters, and without."""
    return [Side(name, partial(decode, engine, name, sampling)) for name in (DRAFTING, PLAIN)]


def decode(
    engine: Engine, name: str, sampling: SamplingParams, prompt: Sequence[int], max_tokens: int
) -> Run:
    with engine.without_drafting() if name == PLAIN else nullcontext():
        result = engine.generate(prompt, max_tokens=max_tokens, sampling=sampling)
    return Run(tuple(token.id for token in result.tokens), result.stats)


@dataclass(frozen=True)
class Task:
    prompt: Prompt
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BenchPlan:
    """What is decoded how often, and what was left out."""

    tasks: Sequence[Task]
    skipped: Sequence[Prompt]  # too long for the model's context
    warm_up: tuple[int, ...]
    max_tokens: int
    repetitions: int
    room: int  # tokens in the model's context

    @property
    def context_length(self) -> int:
        """Tokens of the longest prompt and answer, and of some drafts."""
        longest = max(len(self.warm_up), *(len(task.tokens) for task in self.tasks))
        return min(self.room, longest + max(self.max_tokens, _WARM_UP_TOKENS) + _DRAFT_TOKENS)


@dataclass(frozen=True)
class Answered:
    """Each side's answers to one task, one per repetition."""

    task: Task
    runs: dict[str, list[Run]]

    def of(self, *sides: str) -> list[Run]:
        return [run for side in sides for run in self.runs[side]]


@dataclass(frozen=True)
class BenchMeasurement:
    plan: BenchPlan
    answered: Sequence[Answered]
    failures: dict[str, str]  # of sides that were given up
    partial: bool  # interrupted: fewer prompts or repetitions than planned


@dataclass(frozen=True)
class SampledMeasurement:
    """A part of the prompts measured again with sampling. how: `sampling` in words, its `source`,
    prompts `per_category`."""

    measured: BenchMeasurement
    how: Mapping[str, Any]


def make_plan(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int, repetitions: int
) -> BenchPlan:
    """Tokenize prompts. Raises ContextFullError if none fits."""
    room = engine.parts.model.config.context_length - engine.parts.min_rows + 1
    tasks, skipped = [], []
    for prompt in prompts:
        tokens = tuple(engine.parts.text.prompt_of(prompt.text))
        if len(tokens) <= room:
            tasks.append(Task(prompt, tokens))
        else:
            skipped.append(prompt)
    if not tasks:
        raise ContextFullError(
            f"none of {len(prompts)} prompts fits the context of {room} tokens",
            remedy="Give shorter ones with --prompts, or a larger --context.",
        )
    warm_up = tuple(engine.parts.text.prompt_of(_WARM_UP))[:room]
    return BenchPlan(tasks, skipped, warm_up, max_tokens, repetitions, room)


def measure(sides: Sequence[Side], plan: BenchPlan, progress: Progress) -> BenchMeasurement:
    """Answer each prompt on all sides in succession; the first two alternate in going first.
    KeyboardInterrupt ends it with partial results; another program's side that fails is given up.

    Repetitions are passes over all prompts: a drafter that meets a prompt twice in a row takes it
    for the same conversation and knows the answer. With one prompt, the warm-up separates passes.
    """
    passes: list[list[dict[str, Run]]] = []  # runs by side of each turn
    failures: dict[str, str] = {}
    partial = False

    def take_turn(order: Sequence[Side], prompt: Sequence[int], max_tokens: int) -> dict[str, Run]:
        runs = {}
        for side in order:
            if side.name not in failures:
                try:
                    runs[side.name] = side.answer(prompt, max_tokens)
                except Exception as error:
                    if side.name in (DRAFTING, PLAIN):
                        raise
                    failures[side.name] = describe_error(error)
        return runs

    try:
        for repetition in range(plan.repetitions):
            take_turn(sides, plan.warm_up, _WARM_UP_TOKENS)
            passes.append([])
            for i, task in enumerate(plan.tasks):
                progress("Measuring", (repetition + i / len(plan.tasks)) / plan.repetitions)
                order = [*sides[:2][:: -1 if (repetition + i) % 2 else 1], *sides[2:]]
                passes[-1].append(take_turn(order, task.tokens, plan.max_tokens))
    except KeyboardInterrupt:
        partial = True
    if len(passes) > 1 and len(passes[-1]) < len(plan.tasks):
        del passes[-1]
    names = [side.name for side in sides if side.name not in failures]
    answered = [  # fewer tasks if the only pass was cut short
        Answered(task, {name: [turn[name] for turn in turns] for name in names})
        for task, *turns in zip(plan.tasks, *passes, strict=False)
    ]
    return BenchMeasurement(plan, answered if passes else [], failures, partial)


# llama-server as two more sides.

_SERVER = "llama-server"
_SERVER_START_S = 300.0
_END_S = 5.0  # for a server to exit on its own


@dataclass
class Peer:
    """Another program. sides, settings: plain and drafting; if one is missing, `note` says why."""

    weights: str
    name: str = _SERVER
    version: str | None = None
    settings: list[str] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    note: str | None = None

    @property
    def plain(self) -> str:
        return f"{self.name} {PLAIN}"

    @property
    def drafting(self) -> str:
        return f"{self.name} {DRAFTING}"


@contextmanager
def open_peer(gguf: Path, weights: str, threads: int, plan: BenchPlan) -> Iterator[Peer]:
    """Run two servers until the block ends. weights: the GGUF file's name."""
    command = ["-m", str(gguf), "-c", str(plan.context_length), "-np", "1"]
    command += ["-t", str(threads), "-tb", str(threads)]
    with ExitStack() as stack:
        peer = Peer(weights)
        try:
            for name, own in ((peer.plain, []), (peer.drafting, ["--spec-default"])):
                answer, peer.version = _start_server([*command, *own], stack)
                peer.sides.append(Side(name, answer))
                peer.settings.append(" ".join([*own, f"threads: {threads}"]))
        except Exception as error:  # the user reads any error in the note
            peer.note = describe_error(error)
        yield peer


def _start_server(options: Sequence[str], stack: ExitStack) -> tuple[Answer, str]:
    """Return a local server's answer function and version. Raises OSError, RuntimeError if it does
    not start."""
    program = shutil.which(_SERVER)
    if program is None:
        raise FileNotFoundError(f"{_SERVER} is not on the PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"version: (.+)", said.stdout + said.stderr)
    server = subprocess.Popen(
        [program, *options, "--host", "127.0.0.1", "--port", port],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(_end, server)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + _SERVER_START_S
    while not _is_ready(url):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{program} did not start")
        time.sleep(0.05)
    return partial(_ask, url), version[1].strip() if version else "unknown"


def _ask(url: str, prompt: Sequence[int], max_tokens: int) -> Run:
    asked = {"prompt": list(prompt), "n_predict": max_tokens, "temperature": 0}
    body = json.dumps({**asked, "cache_prompt": False, "return_tokens": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completion", body, headers)
    with urllib.request.urlopen(request) as response:
        found = json.load(response)
    timings: Mapping[str, Any] = found["timings"]
    count = timings["predicted_n"] - 1  # predicted_ms starts at the answer's first token
    drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    stats = Stats(
        predicted_n=count,
        predicted_ms=timings["predicted_ms"],
        rounds=count - accepted if drafted else 0,
        draft_n=drafted,
        draft_n_accepted=accepted,
    )
    return Run(tuple(found["tokens"]), stats)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except OSError:  # refused, or 503 while it loads
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
