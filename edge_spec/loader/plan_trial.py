"""Tries placements of a plan for real: the engine that each would be used with writes short texts,
in turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from edge_spec.core.isolated import IsolatedError, isolated, reason_of, tell
from edge_spec.engine.engine import Engine
from edge_spec.loader import load_engine
from edge_spec.models.devices import CPU
from edge_spec.models.options import LoadOptions
from edge_spec.placement.place_work import OnStep, PlaceError
from edge_spec.placement.trial import TRIAL_S, Prompts
from edge_spec.scheduler.plan_file import Placement, apply_placement

_TIMEOUT_S = 300.0
_WARM_UP_TOKENS = 4
_LEAST_MS = 1e-3  # of an answer, where a coarse clock sees no time go by
_BUSY = 2  # times as long as forecast, after which a machine is too busy for the rest

_PLACEMENTS = TypeAdapter(tuple[Placement, ...])


@dataclass(frozen=True)
class EngineTrial:
    """A `placement.trial.Trial` of these models. Where a driver takes part, in a process of its
    own."""

    model: str
    draft: str | None

    def __call__(
        self, placements: Sequence[Placement], prompts: Prompts, num_tokens: int, on_step: OnStep
    ) -> Sequence[float]:
        request = {
            "model": self.model,
            "draft": self.draft,
            "placements": _PLACEMENTS.dump_python(tuple(placements), mode="json"),
            "prompts": [list(each) for each in prompts],
            "num_tokens": num_tokens,
        }
        on_step(0.0)
        places = [place for each in placements for place in (each.target, each.draft) if place]
        try:
            if all(place.device == CPU for place in places):
                return write_in_turns(request, on_step)
            with TemporaryDirectory() as directory:
                file = Path(directory) / "request"  # longer than a command line may be
                file.write_text(json.dumps(request), encoding="utf-8")
                found: list[float] = isolated(
                    do_request, str(file), timeout_s=_TIMEOUT_S, on_step=on_step
                )
                return found
        except IsolatedError as error:
            raise PlaceError(str(error)) from error
        except Exception as error:  # as in the other process
            raise PlaceError(reason_of(error)) from error


def do_request(file: str) -> list[float]:
    """Does the work in the other process. Raises an EdgeSpecError, OSError, and whatever a library
    raises."""
    return write_in_turns(json.loads(Path(file).read_text(encoding="utf-8")), tell)


def write_in_turns(request: Any, on_step: OnStep) -> list[float]:
    """Returns the tokens a second of each placement. Its drafters are new for each answer, so that
    none knows a text that it has written before.

    What counts is the median of its answers' shares of plain decoding's beside them: a single one
    that had to wait for something else decides nothing.
    """
    placements = _PLACEMENTS.validate_python(request["placements"])
    opened = next((each for each in placements if each.draft is not None), placements[0])
    options = apply_placement(LoadOptions(keeps_answers=False), opened, request["draft"])
    rates: list[list[float]] = [[] for _ in placements]
    seconds = 0.0
    with load_engine(request["model"], options, lambda what, fraction: None) as engine:
        _write(engine, "none", request["prompts"][0], _WARM_UP_TOKENS)
        for at, prompt in enumerate(request["prompts"]):
            for turn in range(len(placements)):
                i = (at + turn) % len(placements)
                on_step((at + turn / len(placements)) / len(request["prompts"]))
                stats = _write(engine, placements[i].drafter, prompt, request["num_tokens"])
                seconds += stats.predicted_ms / 1e3
                rates[i].append(1e3 * stats.predicted_n / max(stats.predicted_ms, _LEAST_MS))
            if seconds > _BUSY * TRIAL_S:
                break
    names = [each.drafter for each in placements]
    plain = rates[names.index("none") if "none" in names else 0]
    return [
        median(plain) * median(rate / beside for rate, beside in zip(each, plain, strict=True))
        for each in rates
    ]


def _write(engine: Engine, drafter: str, prompt: Sequence[int], num_tokens: int) -> Any:
    engine.set_drafter(drafter)
    return engine.generate(prompt, max_tokens=num_tokens).stats
