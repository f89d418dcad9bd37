"""Whether drafting changes what the model writes on this device: `edge-spec verify`, as far as the
time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, Mark, not_measured, out_of_time
from edge_spec.diagnostics.lossless_check.prove import MIN_DRAWS, Extent, prove
from edge_spec.diagnostics.lossless_check.report import checks, document
from edge_spec.diagnostics.lossless_check.sampling import NUM_TOKENS
from edge_spec.engine.engine import Engine
from edge_spec.errors import UnsupportedModelError
from edge_spec.text.prompt_files import OWN_PROMPTS, Prompt, read_prompts

_MARKS = {"pass": Mark.PASSED, "ties": Mark.PASSED, "fault": Mark.FAILED}
_MAX_TOKENS = 32
_MOST_PROMPTS, _MOST_DRAWS = 20, 1500
# Plain steps that a unit of each takes: a text is written twice, half of them seeded again, and the
# prompt is read.
_STEPS_PER_PROMPT, _STEPS_PER_DRAW = 6 * _MAX_TOKENS, 2 * NUM_TOKENS
_FIXED_STEPS = 300  # that the numerics and the repeated request take
_DRAWS_SHARE = 0.4  # of the time
_TRIED_TOKENS = 8


def check_lossless(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    with request.engine() as engine:
        step_s = _step_s(engine)
        extent = extent_for(deadline.left_s, step_s)
        if not extent.num_draws:
            took = MIN_DRAWS * _STEPS_PER_DRAW * step_s
            yield out_of_time("distribution", f"{MIN_DRAWS} draws would take about {took:.0f} s")
        try:
            proof = prove(engine, _shortest(read_prompts(OWN_PROMPTS)), extent, deadline.progress)
        except UnsupportedModelError as error:  # nothing was drafted
            yield not_measured("greedy text", error.shown)
            return
    report = document(proof, request.device)
    for name, mark, figures in checks(report):
        parts = {"greedy text": "greedy", "sampled text": "seeded", "distribution": "sampling"}
        numbers = dict(report[parts.get(name, "determinism")])
        for each in numbers.get("differing", ()):
            del each["expected"], each["got"]  # what the model wrote is nobody's business
        found = f"{figures} (promised: {report['promise']})"
        yield CheckRow("", name, _MARKS.get(mark, Mark.NOT_MEASURED), found, numbers)


def _shortest(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Reading long ones takes the time that more of them need."""
    return sorted(prompts, key=lambda each: len(each.text))[:_MOST_PROMPTS]


def extent_for(seconds: float, step_s: float) -> Extent:
    """As much as fits the time, which at the least is two texts and no draws."""
    steps = max(0.0, seconds / max(step_s, 1e-6) - _FIXED_STEPS)
    draws = int(_DRAWS_SHARE * steps / _STEPS_PER_DRAW)
    prompts = int((1 - _DRAWS_SHARE) * steps / _STEPS_PER_PROMPT)
    return Extent(
        num_prompts=max(2, min(_MOST_PROMPTS, prompts)),
        max_tokens=_MAX_TOKENS,
        num_draws=min(_MOST_DRAWS, draws) if draws >= MIN_DRAWS else 0,
        num_runs=2,
    )


def _step_s(engine: Engine) -> float:
    """Of one token without drafting, its share of a short prompt included."""
    prompt = engine.parts.text.prompt_of("Count from one to ten.")
    times = []
    with engine.without_drafting():
        for _ in range(2):  # the first one binds buffers
            began = time.perf_counter()
            engine.generate(prompt, max_tokens=_TRIED_TOKENS)
            times.append((time.perf_counter() - began) / _TRIED_TOKENS)
    return min(times)
