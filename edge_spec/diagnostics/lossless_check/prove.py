"""Compare speculative with plain texts token by token, and report the proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log

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
from edge_spec.diagnostics.report_files import Document, Page, Table, machine_line
from edge_spec.engine.engine import Engine
from edge_spec.engine.results import GenerationResult, Origin
from edge_spec.errors import UsageError
from edge_spec.scheduler.batch_invariance import (
    USUAL_WIDTHS,
    BatchInvariance,
    measure_batch_invariance,
)
from edge_spec.scheduler.lossless import Losslessness, Promise
from edge_spec.scheduler.machine import describe_machine
from edge_spec.scheduler.policy import AlwaysVerifyPolicy
from edge_spec.text.prompt_files import Prompt

# In logits. llama.cpp's own kernels move those of Qwen2.5-Coder 1.5B by up to 0.79
# (benchmarks/results/rows.json). The limit is needed because faulty passes measure as much noise as
# excuses them.
MOST_NOISE = 1.0
_FORCED = 1e6  # added to a token's logit to force it
_LEAST_EVENTS = 5  # fewer accepted or rejected draft tokens show nothing


@dataclass(frozen=True)
class Difference:
    """The first token that differs from the plain text.

    margin: of the plain choice, in logits; None if one text only ended. near_tie: within the noise
    and MOST_NOISE.
    """

    prompt: str
    token_index: int
    expected: str
    got: str
    margin: float | None
    near_tie: bool


@dataclass(frozen=True)
class Texts:
    """near_ties: greedy choices within the noise; most equal plain ones. num_recovered:
    replacements of rejected draft tokens. num_branching: rounds with branching drafts while all
    draft tokens are verified."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_guesses: int = 0
    num_accepted: int = 0
    num_recovered: int = 0
    num_branching: int = 0
    near_ties: int = 0
    differing: tuple[Difference, ...] = ()

    def __add__(self, other: Texts) -> Texts:
        return Texts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def passed(self) -> bool | None:
        """None if equal texts show nothing, because too little happened."""
        equal = all(each.near_tie for each in self.differing)
        return None if equal and self.missing else equal

    @property
    def num_rejected(self) -> int:
        """Rejections; of two branches, one is always rejected."""
        return self.num_recovered + self.num_branching

    @property
    def missing(self) -> str:
        return missing_events(self.num_accepted, self.num_rejected, _LEAST_EVENTS)


@dataclass(frozen=True)
class TextComparison:
    """params: greedy, or only a temperature and a seed. noise: how far a pass's width may change a
    margin, in logits."""

    engine: Engine
    params: SamplingParams
    max_tokens: int
    noise: float

    def compare(self, what: str, tasks: Sequence[Task], progress: Progress) -> Texts:
        """Compare each prompt's answer with the plain one, generated right before.

        In every other task, all draft tokens are verified from the first on. The others use the
        engine's settings, which may skip what does not pay.
        """
        found = Texts()
        with self.engine.verifying_all_draft_tokens() as exercised:
            for i, task in enumerate(tasks[::2]):
                progress(what, 2 * i / len(tasks))
                found += self._compare(task)
        found += Texts(num_branching=exercised[AlwaysVerifyPolicy.BRANCHES])
        for i, task in enumerate(tasks[1::2]):
            progress(f"{what}, as set up", 2 * i / len(tasks))
            found += self._compare(task)
        return found

    def _compare(self, task: Task) -> Texts:
        with self.engine.without_drafting():
            expected = [token.id for token in self._answer(task).tokens]
        result = self._answer(task)
        got = [token.id for token in result.tokens]
        return Texts(
            num_prompts=1,
            num_tokens=len(expected),
            num_guesses=result.stats.draft_n,
            num_accepted=result.stats.draft_n_accepted,
            num_recovered=sum(token.origin is Origin.RECOVERED for token in result.tokens),
            near_ties=result.stats.near_ties,
            differing=() if expected == got else (self._difference(task, expected, got),),
        )

    def _answer(self, task: Task) -> GenerationResult:
        return self.engine.generate(task.tokens, max_tokens=self.max_tokens, sampling=self.params)

    def _difference(self, task: Task, expected: Sequence[int], got: Sequence[int]) -> Difference:
        shared = min(len(expected), len(got))
        at = next((i for i in range(shared) if expected[i] != got[i]), shared)
        margin = None
        if at < shared:
            margin = self._margin([*task.tokens, *expected[:at]], at, expected[at], got[at])
        return Difference(
            prompt=task.prompt.id,
            token_index=at,
            expected=self._text(expected[at : at + 1]),
            got=self._text(got[at : at + 1]),
            margin=margin,
            near_tie=margin is not None and margin <= min(self.noise, MOST_NOISE),
        )

    def _margin(self, before: Sequence[int], position: int, won: int, lost: int) -> float:
        """Return the margin in logits, equal to that of log probabilities. In a seeded choice
        (sampling.py), the largest log(probability) / temperature - log(E) wins."""
        scores = [self._log_probability(before, token) for token in (won, lost)]
        if self.params.seed is not None:
            key = Draws(self.params.seed, Purpose.POSITION).at(position)
            for i, number in enumerate(exponential(key, np.array([won, lost]))):
                scores[i] -= self.params.temperature * log(number)
        return abs(scores[0] - scores[1])

    def _log_probability(self, before: Sequence[int], token: int) -> float:
        """Score a token as plain decoding does."""
        forced = SamplingParams(logit_bias={token: _FORCED})
        with self.engine.without_drafting():
            result = self.engine.generate(before, max_tokens=1, sampling=forced, logprobs=0)
        logprob = result.tokens[0].logprob
        assert logprob is not None  # it was requested
        return logprob

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self.engine.parts.text.tokenizer
        return tokenizer.decode(tokens) or "".join(map(tokenizer.token_text, tokens))  # special


_BEGUN_PROMPTS = 3  # prompts whose answers provide text to sample after
_GREEDY = SamplingParams()
_SEEDED = SamplingParams(temperature=0.7, seed=1)


@dataclass(frozen=True)
class Proof:
    """seeded, sampling: None without draws, and for a model that samples by plain steps alone in
    exact mode. lossless: the promise. numerics: how rows depend on their pass's width. skipped: ids
    of prompts too long for the context."""

    model: str
    runtime: str
    drafter: str
    lossless: Losslessness
    greedy: Texts
    seeded: Texts | None
    sampling: Sampling | None
    numerics: BatchInvariance
    skipped: tuple[str, ...]

    @property
    def parts(self) -> dict[str, Texts | Sampling]:
        found = {
            "greedy text": self.greedy,
            "sampled text": self.seeded,
            "distribution": self.sampling,
        }
        return {name: part for name, part in found.items() if part is not None}

    @property
    def passed(self) -> bool | None:
        """None if nothing failed but a part shows nothing: too few accepted or rejected draft
        tokens. Allowed near ties are no failure."""
        found = {part.passed for part in self.parts.values()}
        return False if False in found else None if None in found else True

    @property
    def verdict(self) -> str:
        return _mark(self.passed, self.differing)

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """What speculation does beyond this proof."""
        found = ["several conversations at once: one was answered at a time"]
        if not any(part.num_branching for part in (self.greedy, self.seeded) if part is not None):
            found.insert(0, "branches: no verified draft tokens branched")
        if self.sampling is None:
            found.insert(0, "sampled text and its distribution: nothing was sampled with drafts")
        return tuple(found)

    @property
    def differing(self) -> tuple[Difference, ...]:
        """Greedy and seeded texts that left the plain ones."""
        return self.greedy.differing + (self.seeded.differing if self.seeded else ())


def prove(engine: Engine, prompts: Sequence[Prompt], extent: Extent, progress: Progress) -> Proof:
    """Compare an engine with its own plain decoding; it stays usable. Raises UsageError without
    drafters, ContextFullError if no prompt fits."""
    if engine.drafter == "none":
        raise UsageError(
            "without a drafter there is nothing to verify",
            remedy="Name a drafter, such as --drafter suffix,recycling.",
        )
    count = min(extent.count, len(prompts))
    spread = [prompts[i * len(prompts) // count] for i in range(count)]
    plan = make_plan(engine, spread, extent.max_tokens, 1)
    progress("Measuring the numerics", 0.0)
    batch_invariance = _measure(engine)
    lossless = engine.parts.speculation_factory.lossless
    noise = 0.0
    if lossless.promise is Promise.TIES:
        noise = max(batch_invariance.tie_margin, lossless.tie_margin)
    comparison = TextComparison(engine, _GREEDY, extent.max_tokens, noise)
    greedy = comparison.compare("Comparing greedy texts", plan.tasks, progress)
    seeded, sampling = None, None
    if extent.draws and not engine.parts.speculation_factory.lossless.plain_samples:
        sampled = replace(comparison, params=_SEEDED)
        seeded = sampled.compare("Comparing sampled texts", plan.tasks[::2], progress)
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
        numerics=replace(batch_invariance, tie_margin=noise),
        skipped=tuple(prompt.id for prompt in plan.skipped),
    )


def _measure(engine: Engine) -> BatchInvariance:
    learner = engine.parts.learner
    if learner is not None:
        learner.pause()
    try:
        return measure_batch_invariance(engine.parts.model, USUAL_WIDTHS)
    finally:
        if learner is not None:
            learner.resume()


def document(proof: Proof, device: str) -> Document:
    """docs/cli.md lists the fields."""
    machine = describe_machine()
    versions = machine.pop("versions")
    return {
        "verdict": proof.verdict,
        "model": proof.model,
        "runtime": proof.runtime,
        "device": device,
        "drafter": proof.drafter,
        "lossless": str(proof.lossless.mode),
        "promise": str(proof.lossless.promise),
        "greedy": _of_texts(proof.greedy),
        "seeded": None if proof.seeded is None else _of_texts(proof.seeded),
        "sampling": None if proof.sampling is None else _of_sampling(proof.sampling),
        "numerics": asdict(proof.numerics),
        "not_exercised": list(proof.not_exercised),
        "skipped_prompts": list(proof.skipped),
        "machine": machine,
        "versions": versions,
    }


def _of_texts(texts: Texts) -> Document:
    return asdict(texts) | {
        "missing": texts.missing,
        "passed": texts.passed,
        "num_rejected": texts.num_rejected,
        "num_differing_prompts": len(texts.differing),
    }


def _of_sampling(sampling: Sampling) -> Document:
    found = asdict(sampling)
    del found["noise_factor"]
    return {**found, **found.pop("fit")} | {
        "missing": sampling.missing,
        "passed": sampling.passed,
        "p_value": sampling.fit.p_value,
        "within_noise_only": sampling.is_within_noise_only,
    }


_COLORS = {"pass": "green", "ties": "yellow", "inconclusive": "yellow", "fail": "red"}
_SHOWN = 8  # differences on a page


def page(proof: Proof) -> Page:
    told = f"{proof.model} on {proof.runtime}, drafter {proof.drafter}"
    yield f"edge-spec verify: {told}; promised: {proof.lossless.promise}"
    verdict = "NEAR TIES" if proof.verdict == "ties" else proof.verdict.upper()
    yield f"{verdict}: {_summary(proof)}"
    rows = checks(proof)
    yield Table(("check", "result", "found"), rows, [_COLORS[mark] for _, mark, _ in rows])
    if proof.differing:
        header = ("prompt", "token", "plain", "got", "margin", "near tie")
        yield Table(header, list(map(_row, proof.differing[:_SHOWN])))
    if len(proof.differing) > _SHOWN:
        yield f"and {len(proof.differing) - _SHOWN} more: --json lists all"
    yield from (f"not exercised: {claim}" for claim in proof.not_exercised)
    widths = ", ".join(map(str, proof.numerics.invariant_widths))
    noise = proof.numerics.tie_margin
    yield f"Rows are equal bit for bit in passes of {widths}; noise {noise:.4f}."
    yield machine_line(describe_machine())
    if proof.skipped:
        yield f"Too long for the context, left out: {', '.join(proof.skipped)}."


def _row(found: Difference) -> tuple[str, ...]:
    margin = "" if found.margin is None else f"{found.margin:.4f}"
    tie = "yes" if found.near_tie else "no"
    index = str(found.token_index)
    return found.prompt, index, repr(found.expected), repr(found.got), margin, tie


def _summary(proof: Proof) -> str:
    advice = "see whether --exact helps"
    if proof.passed is False:
        is_fault = proof.lossless.promise is not Promise.TIES
        advice = "this is a fault: report it" if is_fault else advice
        return f"Speculation changes what this model writes; {advice}."
    if proof.passed is None:
        missing = [
            f"{name}: {part.missing}" for name, part in proof.parts.items() if part.passed is None
        ]
        return (
            f"Too little happened to show anything ({'; '.join(missing)}). Raise --count and "
            "--max-tokens, or name a --drafter that the model sometimes agrees with."
        )
    if proof.differing:
        count = len(proof.differing)
        texts = f"{count} text{'s' if count > 1 else ''}"
        return f"{texts} differ from plain ones at near ties, which this mode allows; {advice}."
    if proof.sampling is not None and proof.sampling.is_within_noise_only:
        return f"Equal up to rounding, within this machine's numeric noise; {advice}."
    return "Speculation changes nothing: the text is the model's own."


def checks(proof: Proof) -> list[tuple[str, str, str]]:
    """Return name, mark and figures of each check. Marks: "pass", "ties" (texts differ at allowed
    near ties), "fail", "inconclusive"."""
    found = []
    for name, part in proof.parts.items():
        if isinstance(part, Sampling):
            found.append((name, _mark(part.passed), _describe_sampling(part)))
        else:
            mark = _mark(part.passed, part.differing)
            found.append((name, mark, _describe_texts(part, mark, proof.lossless.mode)))
    return found


def _mark(passed: bool | None, differing: Sequence[Difference] = ()) -> str:
    if passed is None:
        return "inconclusive"
    if not passed:
        return "fail"
    return "ties" if differing else "pass"


def _describe_texts(texts: Texts, mark: str, mode: str) -> str:
    """Never call differing texts a pass."""
    left, count = len(texts.differing), texts.num_prompts
    near = sum(each.near_tie for each in texts.differing)
    if not left:
        said = f"all {count} texts equal the plain ones bit for bit"
    elif mark == "ties":
        said = f"{left} of {count} texts differ at near ties (allowed by --lossless {mode})"
    else:
        said = f"{left - near} of {count} texts differ: fault"
        said += f"; {near} more differ at near ties" if near else ""
    return (
        f"{said}, {texts.num_tokens:,} tokens; {texts.num_accepted:,} of "
        f"{texts.num_guesses:,} draft tokens accepted"
    )


def _describe_sampling(sampling: Sampling) -> str:
    drafted, fit = sampling.origins, sampling.fit
    return (
        f"{fit.num_draws:,} draws of {sampling.num_tokens} tokens ({drafted['accepted']:,} "
        f"accepted, {drafted['recovered']:,} recovered, {drafted['bonus']:,} bonus): p at most "
        f"{fit.p_value:.2g}; total variation {fit.total_variation:.4f}, bound "
        f"{fit.total_variation_bound:.4f}"
    )
