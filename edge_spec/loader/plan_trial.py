"""Tries drafters of a plan for real: the engine that they would be used with writes short texts, in
turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from edge_spec.core.metrics import Stats
from edge_spec.errors import EdgeSpecError
from edge_spec.loader import load_engine
from edge_spec.models.devices import CPU
from edge_spec.placement.plan import Placement
from edge_spec.placement.planner import TRIAL_S, Prompts, Tried, Wrote
from edge_spec.placement.survey import OnStep, attempt, attempt_apart

_WARM_UP_TOKENS = 4
_LEAST_MS = 1e-3  # of an answer, where a coarse clock sees no time go by
_BUSY = 2  # times as long as forecast, after which a machine is too busy for the rest

_PLACEMENTS = TypeAdapter(tuple[Placement, ...])
_WROTE = TypeAdapter(dict[str, Tried | str])


@dataclass(frozen=True)
class EngineTrial:
    """A `placement.planner.Trial` of these models. Where a driver takes part, in a process of its
    own."""

    model: str
    draft: str | None

    def __call__(
        self, placements: Sequence[Placement], prompts: Prompts, num_tokens: int, on_step: OnStep
    ) -> Wrote:
        request = {
            "model": self.model,
            "draft": self.draft,
            "placements": _PLACEMENTS.dump_python(tuple(placements), mode="json"),
            "prompts": [list(each) for each in prompts],
            "num_tokens": num_tokens,
        }
        on_step(0.0)
        places = [place for each in placements for place in (each.target, each.draft) if place]
        if all(place.device == CPU for place in places):
            found = attempt(partial(write_in_turns, request), on_step)
        else:
            found = attempt_apart(write_in_turns, request, on_step)
        return _WROTE.validate_python(found)


@dataclass
class _Answers:
    """What one drafter wrote: tokens a second of each answer, and its draft tokens."""

    rates: list[float] = field(default_factory=list)
    num_verified: int = 0
    num_accepted: int = 0

    def add(self, stats: Stats) -> None:
        self.rates.append(1e3 * stats.predicted_n / max(stats.predicted_ms, _LEAST_MS))
        self.num_verified += stats.draft_n
        self.num_accepted += stats.draft_n_accepted

    def beside(self, plain: _Answers) -> Tried:
        """What counts is the median of the answers' shares of plain decoding's beside them: a
        single one that had to wait for something else decides nothing."""
        speedup = median(rate / other for rate, other in zip(self.rates, plain.rates, strict=True))
        accepted = self.num_accepted / self.num_verified if self.num_verified else None
        return Tried(median(plain.rates) * speedup, speedup, accepted)


def write_in_turns(request: Any, on_step: OnStep) -> Any:
    """Return what each drafter wrote, or why the model cannot have it. Drafters are new for each
    answer, so that none knows a text that it has written before."""
    placements = _PLACEMENTS.validate_python(request["placements"])
    opened = next((each for each in placements if each.draft is not None), placements[0])
    options = replace(opened.options(request["draft"]), keeps_answers=False)
    answers = {each.drafter: _Answers() for each in placements}
    refused: dict[str, str] = {}
    seconds = 0.0
    with load_engine(request["model"], options, lambda what, fraction: None) as engine:
        engine.set_drafter("none")
        engine.generate(request["prompts"][0], max_tokens=_WARM_UP_TOKENS)
        for at, prompt in enumerate(request["prompts"]):
            names = [name for name in answers if name not in refused]
            for turn in range(len(names)):
                name = names[(at + turn) % len(names)]
                on_step((at + turn / len(names)) / len(request["prompts"]))
                try:
                    engine.set_drafter(name)
                except EdgeSpecError as error:
                    refused[name] = error.shown
                    continue
                stats = engine.generate(prompt, max_tokens=request["num_tokens"]).stats
                seconds += stats.predicted_ms / 1e3
                answers[name].add(stats)
            if seconds > _BUSY * TRIAL_S:
                break
    plain = answers["none"]
    tried = {name: each.beside(plain) for name, each in answers.items() if name not in refused}
    return _WROTE.dump_python({**tried, **refused}, mode="json")
