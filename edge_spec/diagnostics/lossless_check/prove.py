"""Texts with speculation against plain ones, token for token, and the whole proof: as one document,
and what that says in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log
from typing import Any

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.rng import Draws, Purpose, exponential
from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.bench.measuring import Task, make_plan
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.diagnostics.lossless_check.sampling import (
    Sampling,
    check_sampling,
    missing_events,
)
from edge_spec.engine.engine import Engine
from edge_spec.engine.results import GenerationResult, Origin
from edge_spec.errors import UsageError
from edge_spec.scheduler.batch_invariance import (
    USUAL_WIDTHS,
    BatchInvariance,
    measure_batch_invariance,
    measured_widths,
)
from edge_spec.scheduler.lossless import Losslessness, Promise
from edge_spec.scheduler.machine import describe_machine
from edge_spec.scheduler.policy import AlwaysVerifyPolicy
from edge_spec.text.prompt_files import Prompt

# In logits. Rounding made 0.75 at most on the runtimes that we know (docs/lossless.md); passes that
# are wrong by themselves measure as much noise as they need for an excuse.
MOST_NOISE = 1.0
_FORCED = 1e6  # added to a token's logit: it is what is written
_LEAST_EVENTS = 5  # accepted draft tokens, and rejected ones: fewer show nothing


@dataclass(frozen=True)
class Difference:
    """The first token at which a text left the plain one.

    margin: by how much the plain choice won there, in logits; None where one text only ended.
    near_tie: within the noise, and within MOST_NOISE.
    """

    prompt: str
    token_index: int
    expected: str
    got: str
    margin: float | None
    near_tie: bool


@dataclass(frozen=True)
class Texts:
    """near_ties: greedy choices within the noise; most come out as in the plain text.
    num_recovered: tokens that the target wrote in the place of wrong ones. num_branching: rounds
    whose draft tokens branched, of those that verified all draft tokens."""

    num_prompts: int
    num_tokens: int
    num_guesses: int
    num_accepted: int
    num_recovered: int
    num_branching: int
    near_ties: int
    differing: tuple[Difference, ...]

    def __add__(self, other: Texts) -> Texts:
        return Texts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def passed(self) -> bool | None:
        """Returns None where too little happened to show anything."""
        equal = all(difference.near_tie for difference in self.differing)
        return None if equal and self.missing else equal

    @property
    def num_rejected(self) -> int:
        """Count rejections. Of two branches one is rejected, whatever the target writes."""
        return self.num_recovered + self.num_branching

    @property
    def missing(self) -> str:
        return missing_events(self.num_accepted, self.num_rejected, _LEAST_EVENTS)


@dataclass(frozen=True)
class TextComparison:
    """params: greedy, or a temperature and a seed, and nothing else. noise: the change of a
    margin, in logits, that the width of a pass may make."""

    engine: Engine
    params: SamplingParams
    max_tokens: int
    noise: float

    def half_eager(self, what: str, tasks: Sequence[Task], progress: Progress) -> Texts:
        """Verifies all draft tokens of every other task from the first on; the others are
        answered as the engine is set up, which may leave out what does not pay."""
        with self.engine.verifying_all_draft_tokens() as exercised:
            always_verify = self.texts(what, tasks[::2], progress)
        num_branching = exercised[AlwaysVerifyPolicy.BRANCHES]
        always_verify = replace(always_verify, num_branching=num_branching)
        return always_verify + self.texts(f"{what}, as set up", tasks[1::2], progress)

    def texts(self, what: str, tasks: Sequence[Task], progress: Progress) -> Texts:
        """Each prompt's answer against the plain one, which is written right before it."""
        results, num_tokens, differing = [], 0, []
        for i, task in enumerate(tasks):
            progress(what, i / len(tasks))
            with self.engine.without_drafting():
                expected = ids(self._answer(task))
            num_tokens += len(expected)
            results.append(self._answer(task))
            differing += self._difference(task, expected, ids(results[-1]))
        return Texts(
            num_prompts=len(tasks),
            num_tokens=num_tokens,
            num_guesses=sum(result.stats.draft_n for result in results),
            num_accepted=sum(result.stats.draft_n_accepted for result in results),
            num_recovered=sum(
                token.origin is Origin.RECOVERED for result in results for token in result.tokens
            ),
            num_branching=0,
            near_ties=sum(result.stats.near_ties for result in results),
            differing=tuple(differing),
        )

    def repeated(
        self, task: Task, num_runs: int, progress: Progress
    ) -> tuple[int, list[Difference]]:
        """Returns the draft tokens that all runs of one request verified, and the difference of
        each further run from the first. All draft tokens are verified, whether or not that pays."""
        with self.engine.verifying_all_draft_tokens():
            first = self._answer(task)
            num_guesses, differing = first.stats.draft_n, []
            for i in range(1, num_runs):
                progress("Repeating a request", i / num_runs)
                again = self._answer(task)
                num_guesses += again.stats.draft_n
                differing += self._difference(task, ids(first), ids(again))
        return num_guesses, differing

    def _answer(self, task: Task) -> GenerationResult:
        return self.engine.generate(task.tokens, max_tokens=self.max_tokens, sampling=self.params)

    def _difference(
        self, task: Task, expected: Sequence[int], got: Sequence[int]
    ) -> list[Difference]:
        if expected == got:
            return []
        shared = min(len(expected), len(got))
        at = next((i for i in range(shared) if expected[i] != got[i]), shared)
        margin = None
        if at < shared:
            margin = self._margin([*task.tokens, *expected[:at]], at, expected[at], got[at])
        return [
            Difference(
                prompt=task.prompt.id,
                token_index=at,
                expected=self._text(expected[at : at + 1]),
                got=self._text(got[at : at + 1]),
                margin=margin,
                near_tie=margin is not None and margin <= min(self.noise, MOST_NOISE),
            )
        ]

    def _margin(self, before: Sequence[int], position: int, won: int, lost: int) -> float:
        """Returns the margin in logits, which log probabilities differ by too. In the race of a
        seeded choice (sampling.py) the largest log(probability) / temperature - log(E) wins."""
        scores = [self._log_probability(before, token) for token in (won, lost)]
        if self.params.seed is not None:
            key = Draws(self.params.seed, Purpose.POSITION).at(position)
            for i, number in enumerate(exponential(key, np.array([won, lost]))):
                scores[i] -= self.params.temperature * log(number)
        return abs(scores[0] - scores[1])

    def _log_probability(self, before: Sequence[int], token: int) -> float:
        """Scores the token as plain decoding does."""
        forced = SamplingParams(logit_bias={token: _FORCED})
        with self.engine.without_drafting():
            result = self.engine.generate(before, max_tokens=1, sampling=forced, logprobs=0)
        logprob = result.tokens[0].logprob
        assert logprob is not None  # it was asked for
        return logprob

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self.engine.parts.text.tokenizer
        return tokenizer.decode(tokens) or "".join(map(tokenizer.token_text, tokens))  # special


def ids(result: GenerationResult) -> list[int]:
    return [token.id for token in result.tokens]


_BEGUN_PROMPTS = 3  # whose answers the target begins for what is sampled
_GREEDY = SamplingParams()
_SEEDED = SamplingParams(temperature=0.7, seed=1)


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
    plan = make_plan(engine, _spread(prompts, extent.count), extent.max_tokens, 1)
    progress("Measuring the numerics", 0.0)
    batch_invariance = _measured(engine)
    lossless = engine.parts.speculation_factory.lossless
    noise = 0.0
    if lossless.promise is Promise.TIES:
        noise = max(batch_invariance.tie_margin, lossless.tie_margin)
    comparison = TextComparison(engine, _GREEDY, extent.max_tokens, noise)
    greedy = comparison.half_eager("Comparing greedy texts", plan.tasks, progress)
    num_guesses, differing = comparison.repeated(plan.tasks[0], extent.runs, progress)
    seeded, sampling = None, None
    if extent.draws and not engine.parts.speculation.plain_samples:
        seeded = replace(comparison, params=_SEEDED).half_eager(
            "Comparing sampled texts", plan.tasks[::2], progress
        )
        begun = [task.tokens for task in plan.tasks[:_BEGUN_PROMPTS]]
        sampling = check_sampling(engine, extent.draws, noise, progress, begun)
    return Proof(
        model=engine.name,
        runtime=engine.runtime,
        drafter=engine.drafting,
        lossless=lossless,
        greedy=greedy,
        seeded=seeded,
        sampling=sampling,
        determinism=Determinism(
            runs=extent.runs,
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
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


Document = dict[str, Any]

_MORE = "Raise --count and --max-tokens, or name a --drafter that the model sometimes agrees with."
_VERDICTS = {"pass": "pass", "fault": "fail", "ties": "ties", "open": "inconclusive"}


def document(proof: Proof, device: str) -> Document:
    """docs/lossless.md lists the fields."""
    machine = describe_machine()
    versions = machine.pop("versions")
    return {
        "verdict": _VERDICTS[_mark(proof.passed, len(proof.differing))],
        "model": proof.model,
        "runtime": proof.runtime,
        "device": device,
        "drafter": proof.drafter,
        "lossless": str(proof.lossless.mode),
        "promise": str(proof.lossless.promise),
        "greedy": _texts(proof.greedy),
        "seeded": None if proof.seeded is None else _texts(proof.seeded),
        "sampling": None if proof.sampling is None else _sampling(proof.sampling),
        "determinism": {
            **asdict(proof.determinism),
            "missing": proof.determinism.missing,
            "num_differing": len(proof.determinism.differing),
            "passed": proof.determinism.passed,
        },
        "not_exercised": list(proof.not_exercised),
        "skipped_prompts": list(proof.skipped),
        "machine": machine,
        "versions": versions,
    }


def summary(report: Document) -> str:
    """The verdict in a sentence or two, for those who want no more."""
    left, sampling = [each for _, each in differences(report)], report["sampling"]
    only_texts = not sampling or (sampling["passed"] and not sampling["within_noise_only"])
    advice = "see whether --exact helps"
    if report["verdict"] == "fail":
        advice = advice if report["promise"] == Promise.TIES else "this is a fault: report it"
        return f"Speculation changes what this model writes; {advice}."
    if report["verdict"] == "inconclusive":
        keys = {"greedy": "greedy text", "seeded": "sampled text", "sampling": "distribution"}
        keys["determinism"] = "determinism"
        open_parts = {key: report[key] for key in keys if report[key]}
        why = "; ".join(
            f"{keys[key]}: {part['missing']}"
            for key, part in open_parts.items()
            if part["passed"] is None
        )
        return f"Too little happened to show anything ({why}). {_MORE}"
    if not left and only_texts:
        return "Speculation changes nothing: the text is the model's own."
    if not left:
        return f"Equal up to rounding, within this machine's numeric noise; {advice}."
    texts = f"{len(left)} text{'s' if len(left) > 1 else ''}"
    return f"{texts} part from plain ones at near ties, which this mode allows; {advice}."


def checks(report: Document) -> list[tuple[str, str, str]]:
    """Name, mark and figures of each check that was made. A mark is "pass", "ties" (texts part, at
    near ties that the mode allows), "fault", or "open" where nothing was shown."""
    found = []
    for name, key in (("greedy text", "greedy"), ("sampled text", "seeded")):
        texts = report[key]
        if texts:
            mark = _mark(texts["passed"], texts["num_differing_prompts"])
            found.append((name, mark, _told(texts, mark, report["lossless"])))
    sampling, repeated = report["sampling"], report["determinism"]
    if sampling:
        drafted = sampling["origins"]
        found.append(
            (
                "distribution",
                _mark(sampling["passed"], 0),
                f"{sampling['num_draws']:,} draws of {sampling['num_tokens']} tokens "
                f"({drafted['accepted']:,} accepted, {drafted['recovered']:,} recovered, "
                f"{drafted['bonus']:,} bonus): p at most {sampling['p_value']:.2g}; total "
                f"variation {sampling['total_variation']:.4f}, bound "
                f"{sampling['total_variation_bound']:.4f}",
            )
        )
    widths = ", ".join(str(width) for width in repeated["invariant_widths"])
    found.append(
        (
            "determinism",
            _mark(repeated["passed"], repeated["num_differing"]),
            f"{repeated['num_differing']} of {repeated['runs']} runs differ from the first; rows "
            f"equal bit for bit in passes of {widths}; noise {repeated['tie_margin']:.4f}",
        )
    )
    return found


def _texts(texts: Texts) -> Document:
    return {
        **asdict(texts),
        "num_rejected": texts.num_rejected,
        "missing": texts.missing,
        "num_differing_prompts": len(texts.differing),
        "passed": texts.passed,
    }


def _sampling(sampling: Sampling) -> Document:
    return {
        "num_tokens": sampling.num_tokens,
        "origins": sampling.origins,
        "missing": sampling.missing,
        **asdict(sampling.fit),
        "p_value": sampling.fit.p_value,
        "noise_bound": sampling.noise_bound,
        "told_apart": sampling.told_apart,
        "within_noise_only": sampling.within_noise and not sampling.fit.passed,
        "passed": sampling.passed,
    }


def _mark(passed: bool | None, num_differing: int) -> str:
    if passed is None:
        return "open"
    if not passed:
        return "fault"
    return "ties" if num_differing else "pass"


def _told(texts: Document, mark: str, mode: str) -> str:
    """Words what came of a comparison: nobody is to read that texts that differ have passed."""
    left, count = texts["num_differing_prompts"], texts["num_prompts"]
    near = sum(each["near_tie"] for each in texts["differing"])
    if not left:
        said = f"bit-identical to plain ones: all {count} texts"
    elif mark == "ties":
        said = f"{left} of {count} texts part at near ties (allowed by --lossless {mode})"
    else:
        said = f"{left - near} of {count} texts differ: fault"
        said += f"; {near} more part at near ties" if near else ""
    return (
        f"{said}, {texts['num_tokens']:,} tokens; {texts['num_accepted']:,} of "
        f"{texts['num_guesses']:,} draft tokens accepted"
    )


def differences(report: Document) -> Sequence[tuple[str, Document]]:
    """Returns the differences, each with the check that found each."""
    named = [("greedy", report["greedy"]), ("sampled", report["seeded"] or {"differing": []})]
    named.append(("repeated", report["determinism"]))
    return [(name, each) for name, of in named for each in of["differing"]]
