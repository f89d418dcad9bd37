"""What `edge-spec plan` forecasts for this place, against a short bench of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest, silent
from edge_spec.diagnostics.accept.row import CheckRow, judged, not_measured, out_of_time
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    EngineSide,
    Run,
    make_plan,
    measure,
)
from edge_spec.fitting.devices import Device
from edge_spec.models.source import Source
from edge_spec.placement.plan import Placement
from edge_spec.placement.planner import Planner
from edge_spec.text.prompt_files import OWN_PROMPTS, Prompt, read_prompts

# Forecast over real rate, either way: texts that are replayed are not decoded, so that much may
# come of it; a forecast that is too high by half is wrong.
MOST_OFF = 1.45
_MAX_TOKENS = 48
_PLANNING_SHARE = 0.8  # of the time


def check_forecast(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """Of plain decoding, and of the best drafter that needs no second model. What it measures is
    kept, as a plan's is."""
    source = Source(request.model, silent)
    device = Device(request.runtime, request.device, None, "")
    planning = Deadline(_PLANNING_SHARE * deadline.left_s)
    planner = Planner(source, None, [device], planning.progress)
    plan = planner.make()
    if not planner.is_certain:
        yield not_measured("plain", "; ".join(planner.notes))
        return
    plain = next((each for each in plan.placements if each.drafter == "none"), None)
    if plain is None or plain.tokens_per_s is None:
        yield not_measured("plain", "; ".join(planner.notes) or "there is no forecast")
        return
    same = [each for each in plan.placements if each.target == plain.target]
    drafting = next((each for each in same if each.drafter not in ("none", "answers")), None)
    yield from _benched(request, deadline, plain, drafting)


def _benched(
    request: AcceptRequest, deadline: Deadline, plain: Placement, drafting: Placement | None
) -> Iterator[CheckRow]:
    drafter = "suffix" if drafting is None else drafting.drafter
    target = plain.target
    with request.engine(
        drafts=False, drafter=drafter, threads=target.threads, mmap=target.mmap
    ) as engine:
        prompts = read_prompts(OWN_PROMPTS, per_category=1)
        rate = plain.tokens_per_s or 1.0
        chosen = _affordable(prompts, rate, deadline.left_s)
        tasks = make_plan(engine, chosen, _MAX_TOKENS, 1)
        sides = [EngineSide(engine, name) for name in (DRAFTING, PLAIN)]
        measured = measure(sides, tasks, deadline.progress)
    runs = {
        name: [run for of_pass in found for run in of_pass] for name, found in measured.runs.items()
    }
    yield judge_rate("plain", plain.tokens_per_s, _rate(runs[PLAIN]))
    if drafting is None:
        return
    if len(chosen) < len(prompts):
        found = (
            f"{len(chosen)} of the {len(prompts)} texts of the forecast could be written in time"
        )
        yield out_of_time(drafter, f"{found}, and what is drafted right depends on the text")
    else:
        yield judge_rate(drafter, drafting.tokens_per_s, _rate(runs[DRAFTING]))


def _affordable(prompts: Sequence[Prompt], tokens_per_s: float, seconds: float) -> list[Prompt]:
    """The shortest ones, as many as both sides have time to answer; one at the least."""
    count = int(seconds * tokens_per_s / (4 * _MAX_TOKENS))
    return sorted(prompts, key=lambda each: len(each.text))[: max(1, count)]


def _rate(runs: Sequence[Run]) -> float | None:
    seconds = sum(run.seconds for run in runs)
    return sum(run.num_tokens for run in runs) / seconds if seconds > 0 else None


def judge_rate(drafter: str, forecast: float | None, real: float | None) -> CheckRow:
    """Tokens a second."""
    if forecast is None or real is None:
        return not_measured(drafter, "there is no forecast, or nothing was written")
    off = forecast / real
    return judged(
        drafter,
        1 / MOST_OFF <= off <= MOST_OFF,
        f"forecast {forecast:.1f} tokens/s, real {real:.1f}: {off:.2f} of it",
        forecast_tokens_per_s=forecast,
        real_tokens_per_s=real,
    )
