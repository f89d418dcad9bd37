"""The whole proof, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_spec.core.model import Progress
from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.bench.measuring import make_plan
from edge_spec.diagnostics.lossless_check.sampling import Sampling, check_sampling
from edge_spec.diagnostics.lossless_check.texts import Difference, TextComparison, Texts
from edge_spec.engine.engine import Engine
from edge_spec.errors import UsageError
from edge_spec.exactness.batch_invariance import (
    USUAL_WIDTHS,
    BatchInvariance,
    measure_batch_invariance,
    measured_widths,
)
from edge_spec.exactness.lossless import Losslessness, Promise
from edge_spec.text.prompt_files import Prompt

MIN_DRAWS = 200
_BEGUN_PROMPTS = 3  # whose answers the target begins for what is sampled
_GREEDY = SamplingParams()
_SEEDED = SamplingParams(temperature=0.7, seed=1)


@dataclass(frozen=True)
class Extent:
    """Says how much is tried. Raises UsageError for too little.

    num_draws: 0 leaves sampling out.
    """

    num_prompts: int = 20
    max_tokens: int = 64
    num_draws: int = 1500
    num_runs: int = 3

    def __post_init__(self) -> None:
        for name, value, least in (
            ("count", self.num_prompts, 1),
            ("max-tokens", self.max_tokens, 1),
            ("runs", self.num_runs, 2),
        ):
            if value < least:
                raise UsageError(f"{name} is {value}", remedy=f"It has to be {least} or more.")
        if self.num_draws and self.num_draws < MIN_DRAWS:
            raise UsageError(
                f"{self.num_draws} draws show nothing",
                remedy=f"Give {MIN_DRAWS} or more, or 0 to leave sampling out.",
            )


@dataclass(frozen=True)
class Determinism:
    """Tells whether one request, run again and again, gives one text, and how rows depend on the
    width of their pass. num_guesses: draft tokens that the runs verified."""

    runs: int
    num_guesses: int
    differing: tuple[Difference, ...]
    widths: tuple[int, ...]
    invariant_widths: tuple[int, ...]
    tie_margin: float
    branch_invariant: bool

    @property
    def passed(self) -> bool | None:
        """Returns None where nothing was drafted."""
        equal = all(difference.near_tie for difference in self.differing)
        return None if equal and self.missing else equal

    @property
    def missing(self) -> str:
        return "" if self.num_guesses else "no draft token was verified"


@dataclass(frozen=True)
class Proof:
    """seeded, sampling: None where no samples were asked for, and where a model in exact mode
    samples by plain steps alone. lossless: what was promised. skipped: ids of prompts that the
    context has no room for."""

    model: str
    runtime: str
    drafter: str
    lossless: Losslessness
    greedy: Texts
    seeded: Texts | None
    sampling: Sampling | None
    determinism: Determinism
    skipped: tuple[str, ...]

    @property
    def passed(self) -> bool | None:
        """Returns None where nothing failed, but some part shows nothing: too few draft tokens were
        accepted, or rejected. Near ties are no failure where they are allowed."""
        parts = (self.greedy, self.seeded, self.sampling, self.determinism)
        found = {part.passed for part in parts if part is not None}
        return False if False in found else None if None in found else True

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """Say what else speculation does that nothing here shows."""
        parts = [part for part in (self.greedy, self.seeded) if part is not None]
        found = ["several conversations at once: one was answered at a time"]
        if not sum(part.num_branching for part in parts):
            found.insert(0, "branches: no verified draft tokens branched")
        if self.sampling is None:
            found.insert(0, "sampled text and its distribution: nothing was sampled with drafts")
        return tuple(found)

    @property
    def differing(self) -> tuple[Difference, ...]:
        """Greedy and seeded texts that left the plain ones."""
        return self.greedy.differing + (self.seeded.differing if self.seeded else ())


def prove(engine: Engine, prompts: Sequence[Prompt], extent: Extent, progress: Progress) -> Proof:
    """Compares an engine with its own plain decoding. The engine can be used on.

    Raises UsageError for an engine without drafters, ContextFullError where no prompt fits.
    """
    if engine.drafter == "none":
        raise UsageError(
            "without a drafter there is nothing to verify",
            remedy="Name a drafter, such as --drafter suffix,recycling.",
        )
    plan = make_plan(engine, _spread(prompts, extent.num_prompts), extent.max_tokens, 1)
    progress("Measuring the numerics", 0.0)
    batch_invariance = _measured(engine)
    lossless = engine.parts.speculation_factory.lossless
    noise = 0.0
    if lossless.promise is Promise.TIES:
        noise = max(batch_invariance.tie_margin, lossless.tie_margin)
    comparison = TextComparison(engine, _GREEDY, extent.max_tokens, noise)
    greedy = comparison.half_eager("Comparing greedy texts", plan.tasks, progress)
    num_guesses, differing = comparison.repeated(plan.tasks[0], extent.num_runs, progress)
    seeded, sampling = None, None
    if extent.num_draws and not engine.parts.speculation.plain_samples:
        seeded = replace(comparison, params=_SEEDED).half_eager(
            "Comparing sampled texts", plan.tasks[::2], progress
        )
        begun = [task.tokens for task in plan.tasks[:_BEGUN_PROMPTS]]
        sampling = check_sampling(engine, extent.num_draws, noise, progress, begun)
    return Proof(
        model=engine.name,
        runtime=engine.runtime,
        drafter=engine.drafter,
        lossless=lossless,
        greedy=greedy,
        seeded=seeded,
        sampling=sampling,
        determinism=Determinism(
            runs=extent.num_runs,
            num_guesses=num_guesses,
            differing=tuple(differing),
            widths=tuple(measured_widths(engine.parts.model, USUAL_WIDTHS)),
            invariant_widths=batch_invariance.invariant_widths,
            tie_margin=noise,
            branch_invariant=batch_invariance.branch_invariant,
        ),
        skipped=tuple(prompt.id for prompt in plan.skipped),
    )


def _measured(engine: Engine) -> BatchInvariance:
    work = engine.parts.idle_work
    if work is not None:
        work.pause()
    try:
        return measure_batch_invariance(engine.parts.model, USUAL_WIDTHS)
    finally:
        if work is not None:
            work.resume()


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Returns `count` of them from all over the file, whose kinds of text stand together."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]
