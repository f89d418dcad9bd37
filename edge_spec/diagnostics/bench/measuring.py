"""Sides take turns: each prompt is decoded by all of them, one right after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Progress
from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import GREEDY
from edge_spec.errors import ContextFullError, SessionError
from edge_spec.text.prompt_files import Prompt

DRAFTING, PLAIN = "drafting", "plain"  # our own sides
_WARM_UP = "Count from one to ten."
_WARM_UP_TOKENS = 8
_DRAFT_TOKENS = 32


class SideError(SessionError):
    """A side that cannot go on; the others can."""


@dataclass(frozen=True)
class Run:
    """One answer. num_tokens and seconds are of decoding alone: the prompt is no part of them."""

    tokens: tuple[int, ...]
    num_tokens: int
    seconds: float
    stats: Stats


class Side(Protocol):
    """A way of decoding."""

    @property
    def name(self) -> str: ...

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Raises SideError."""


@dataclass(frozen=True)
class EngineSide:
    """An engine with its drafters, or without them."""

    engine: Engine
    name: str  # DRAFTING or PLAIN
    sampling: SamplingParams = GREEDY

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        engine = self.engine
        with engine.without_drafting() if self.name == PLAIN else nullcontext():
            result = engine.generate(prompt, max_tokens=max_tokens, sampling=self.sampling)
        stats = result.stats
        tokens = tuple(token.id for token in result.tokens)
        return Run(tokens, stats.predicted_n, stats.predicted_ms / 1e3, stats)


@dataclass(frozen=True)
class Task:
    prompt: Prompt
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BenchPlan:
    """Says what is decoded how often, and what was left out."""

    tasks: Sequence[Task]
    skipped: Sequence[Prompt]  # the model has no room for them
    warm_up: tuple[int, ...]
    max_tokens: int
    repetitions: int
    room: int  # tokens of the model's context

    @property
    def context_length(self) -> int:
        """Tokens of the longest prompt with its answer, and some that are drafted after it."""
        longest = max(len(self.warm_up), *(len(task.tokens) for task in self.tasks))
        return min(self.room, longest + max(self.max_tokens, _WARM_UP_TOKENS) + _DRAFT_TOKENS)

    def first_of_each_category(self, count: int) -> BenchPlan:
        """Returns the plan with at most `count` prompts of each category."""
        seen: Counter[str] = Counter()
        kept = []
        for task in self.tasks:
            seen[task.prompt.category] += 1
            if seen[task.prompt.category] <= count:
                kept.append(task)
        return replace(self, tasks=kept)


@dataclass(frozen=True)
class BenchMeasurement:
    """runs: of each side, of each pass over the tasks, in their order; as many for every side."""

    plan: BenchPlan
    runs: dict[str, list[list[Run]]]
    failures: dict[str, str]  # of sides that were given up
    partial: bool  # interrupted: fewer prompts or repetitions than planned

    @property
    def tasks(self) -> Sequence[Task]:
        """Those that were decoded."""
        passes = next(iter(self.runs.values()), [])
        return self.plan.tasks[: len(passes[0])] if passes else ()


@dataclass(frozen=True)
class SampledMeasurement:
    """Holds some of the prompts measured again, each answer drawn by itself. sampling, source: how,
    in words, and who chose it."""

    measured: BenchMeasurement
    per_category: int
    sampling: str
    source: str


def make_plan(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int, repetitions: int
) -> BenchPlan:
    """Raises ContextFullError where no prompt fits the model."""
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
    """Ends early, with what there is, at KeyboardInterrupt. A side that raises SideError is given
    up. The first two sides take turns in going first.

    Repetitions are passes over all prompts: a drafter that met the same prompt twice in a row
    would take it for the same conversation and know the answer. For one prompt alone, what is
    decoded before each pass stands between.
    """
    passes: list[list[dict[str, Run]]] = []
    failures: dict[str, str] = {}
    partial = False
    try:
        for repetition in range(plan.repetitions):
            _decode_all(sides, plan.warm_up, _WARM_UP_TOKENS, failures)
            passes.append([])
            for i, task in enumerate(plan.tasks):
                progress("Measuring", (repetition + i / len(plan.tasks)) / plan.repetitions)
                order = [*sides[:2][:: -1 if (repetition + i) % 2 else 1], *sides[2:]]
                passes[-1].append(_decode_all(order, task.tokens, plan.max_tokens, failures))
    except KeyboardInterrupt:
        partial = True
    if passes and len(passes[-1]) < (len(plan.tasks) if len(passes) > 1 else 1):
        del passes[-1]
    runs = {
        side.name: [[turn[side.name] for turn in of_pass] for of_pass in passes]
        for side in sides
        if side.name not in failures
    }
    return BenchMeasurement(plan, runs, failures, partial)


def _decode_all(
    sides: Sequence[Side], prompt: Sequence[int], max_tokens: int, failures: dict[str, str]
) -> dict[str, Run]:
    """Returns the runs by name, without the sides that fail, which are written down."""
    runs = {}
    for side in sides:
        if side.name not in failures:
            try:
                runs[side.name] = side.decode(prompt, max_tokens)
            except SideError as error:
                failures[side.name] = error.shown
    return runs
