"""Compare the distribution of speculative texts with plain decoding's exact one. The rate of false
alarms holds for any number of draws and any probabilities.

Of n draws of k texts, let p be each text's probability and f its share. Relative entropy is D = sum
of f ln(f / p); correct draws reach n D >= t with a probability of at most exp(k - 1 - t) (t / (k -
1))^(k - 1) (Agrawal 2020, for t > k - 1). Total variation is half the sum of |f - p|. Its mean is
at most half the sum of sqrt(p (1 - p) / n), since E|f - p| is at most the standard deviation; it
exceeds the mean by e with a probability of at most exp(-2 n e^2) (McDiarmid 1989).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, log, tanh
from random import Random

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import MAX_ALTERNATIVES
from edge_spec.engine.results import Alternative, Origin, Token

FALSE_ALARM = 1e-6  # of both tests together, half each

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """How well draws fit probabilities. divergence: n D, in nats."""

    num_draws: int
    num_cells: int
    divergence: float
    total_variation: float
    total_variation_bound: float  # correct draws exceed it with probability FALSE_ALARM / 2
    num_impossible: int  # draws of texts without probability

    @property
    def p_value(self) -> float:
        return self._tail(self.divergence)

    @property
    def passed(self) -> bool:
        return self.passed_within(0.0, 0.0)

    def passed_within(self, change: float, distance: float) -> bool:
        """Return True if draws may come from probabilities q, each within a factor exp(change) of
        p, all within `distance` in total variation.

        D of p exceeds D of q by the sum of f ln(q / p), which is at most the sum of (q - p)^2 / p
        and of (f - q) ln(q / p).
        """
        room = 2 * (expm1(change) * distance + change * self.total_variation_bound)
        return (
            self._tail(self.divergence - self.num_draws * room) >= FALSE_ALARM / 2
            and self.total_variation <= self.total_variation_bound + distance
            and not self.num_impossible
        )

    def _tail(self, divergence: float) -> float:
        free = self.num_cells - 1
        if divergence <= free:
            return 1.0
        return exp(free - divergence + (free * log(divergence / free) if free else 0.0))


def fit(counts: Mapping[Cell, int], probabilities: Mapping[Cell, float]) -> Fit:
    """counts: of each text drawn. probabilities: positive, of each possible text."""
    num_draws = sum(counts.values())
    p = np.array(list(probabilities.values()))
    f = np.array([counts.get(text, 0) for text in probabilities]) / num_draws
    impossible = num_draws - sum(counts.get(text, 0) for text in probabilities)
    mean = np.sqrt(p * (1 - p).clip(0) / num_draws).sum() / 2
    drawn = f > 0
    return Fit(
        num_draws=num_draws,
        num_cells=len(p),
        divergence=float(num_draws * (f[drawn] * np.log(f[drawn] / p[drawn])).sum()),
        total_variation=float(np.abs(f - p).sum() + impossible / num_draws) / 2,
        total_variation_bound=float(mean + np.sqrt(np.log(2 / FALSE_ALARM) / (2 * num_draws))),
        num_impossible=impossible,
    )


# The first draft token may be rejected, so may the second after it; a third token is a bonus.
NUM_TOKENS = 3
TOP_K = 3
_PARAMS = SamplingParams(temperature=1.0, top_k=TOP_K)
# Least share of accepted and of rejected draft tokens: wrong rules only show there.
_LEAST_SHARE = 0.1
_TRIED_DRAWS = 16  # per prompt, to see what follows
_WRITTEN_TOKENS = (8, 24)  # of the target's own text, added to a prompt
# In random order: no model can predict them, but there is always something to draft.
_WORDS, _NUM_WORDS = ("red", "blue", "green"), 64
LAST_PLACE = -1  # stands for a token
_MOST_ALLOWED = 0.2  # largest total variation bound that shows anything
_LEAST_TOLD_APART = 0.5


@dataclass(frozen=True)
class Sampling:
    """How draws of `num_tokens` tokens fit their exact probabilities.

    noise_bound: how far other pass widths may move the distribution, in total variation.
    noise_factor: how far a text's log probability. told_apart: probability of texts without
    LAST_PLACE.
    """

    num_tokens: int
    origins: dict[str, int]  # counts by a token's origin
    fit: Fit
    noise_bound: float
    noise_factor: float
    told_apart: float

    @property
    def within_noise(self) -> bool:
        return self.fit.passed_within(self.noise_factor, self.noise_bound)

    @property
    def is_within_noise_only(self) -> bool:
        return self.within_noise and not self.fit.passed

    @property
    def passed(self) -> bool | None:
        if not self.within_noise:
            return False
        return None if self.missing else True

    @property
    def missing(self) -> str:
        """Why draws show nothing: too few accepted or rejected draft tokens, or noise that may hide
        a wrong rule; "" if they do."""
        least = max(1, round(_LEAST_SHARE * self.fit.num_draws))
        accepted, rejected = self.origins[Origin.ACCEPTED], self.origins[Origin.RECOVERED]
        allowed = self.fit.total_variation_bound + self.noise_bound
        if found := missing_events(accepted, rejected, least):
            return found
        hides = not self.fit.passed and allowed > _MOST_ALLOWED
        if hides or self.told_apart < _LEAST_TOLD_APART:
            return "a wrong rule could hide in what rounding does to the probabilities"
        return ""


@dataclass(frozen=True)
class Reference:
    """What may be drawn. If noise may swap the last token that top-k keeps, its competitors count
    as one, LAST_PLACE, which ends the text.

    competitors: by the text before them.
    """

    probabilities: dict[Cell, float]
    competitors: dict[Cell, frozenset[int]]

    def cell(self, text: Cell) -> Cell:
        """Cut the text at its first competitor, as LAST_PLACE."""
        for i, token in enumerate(text):
            if token in self.competitors.get(text[:i], ()):
                return (*text[:i], LAST_PLACE)
        return text


def check_sampling(
    engine: Engine,
    num_draws: int,
    noise: float,
    progress: Progress,
    prompts: Sequence[Sequence[int]] = (),
) -> Sampling:
    """Draw with all draft tokens verified, whether or not that pays, and without a seed, so that
    drafts are sampled, too (except in exact mode).

    Half of the texts follow unpredictable words, half follow text that the target began after them
    or one of `prompts`. noise: of a logit's distance to the largest.
    """
    words = engine.encode(" ".join(Random(0).choices(_WORDS, k=_NUM_WORDS)))
    agreed = _agreed(engine, [words, *prompts], progress)
    counts: Counter[Cell] = Counter()
    origins: Counter[Origin] = Counter()
    probabilities: dict[Cell, float] = {}
    for half, prompt in enumerate((words[: engine.context_length // 2], agreed)):
        reference, draws = _reference(engine, prompt, noise), (num_draws + half) // 2
        for text, chance in reference.probabilities.items():
            probabilities[half, *text] = chance * draws / num_draws
        with engine.verifying_all_draft_tokens():
            for i in range(draws):
                if i % 32 == 0:
                    progress("Sampling", (half + i / draws) / 2)
                tokens = _draw(engine, prompt)
                text = reference.cell(tuple(token.id for token in tokens))
                counts[half, *text] += 1
                origins.update(token.origin for token in tokens)
    return Sampling(
        num_tokens=NUM_TOKENS,
        origins={origin.value: origins[origin] for origin in Origin},
        fit=fit(counts, probabilities),
        noise_bound=min(1.0, NUM_TOKENS * tanh(noise / 2)),
        noise_factor=NUM_TOKENS * 2 * noise,
        told_apart=sum(p for text, p in probabilities.items() if text[-1] != LAST_PLACE),
    )


def _draw(engine: Engine, prompt: Sequence[int]) -> Sequence[Token]:
    return engine.generate(prompt, max_tokens=NUM_TOKENS, sampling=_PARAMS).tokens


def _agreed(engine: Engine, prompts: Sequence[Sequence[int]], progress: Progress) -> list[int]:
    """Return a prompt and the beginning of its answer after which draft tokens are most often
    accepted, but not always. These draws do not count."""
    candidates: list[list[int]] = []
    for prompt in prompts:
        begun = list(prompt[: engine.context_length // 2])
        with engine.without_drafting():
            result = engine.generate(begun, max_tokens=max(_WRITTEN_TOKENS))
        written = [token.id for token in result.tokens if not token.ends]
        candidates += [begun + written[:count] for count in _WRITTEN_TOKENS]
    best, most = candidates[0], (-1, -1)
    with engine.verifying_all_draft_tokens():
        for i, candidate in enumerate(candidates):
            progress("Looking for text that drafts agree with", i / len(candidates))
            seen: Counter[Origin] = Counter()
            for _ in range(_TRIED_DRAWS):
                seen.update(token.origin for token in _draw(engine, candidate))
            accepted = seen[Origin.ACCEPTED]
            found = min(accepted, seen[Origin.RECOVERED]), accepted
            if found > most:
                best, most = candidate, found
    return best


def _reference(engine: Engine, prompt: Sequence[int], noise: float) -> Reference:
    """Compute all texts' probabilities (usually TOP_K ** NUM_TOKENS), with a plain step per
    prefix."""
    competitors: dict[Cell, frozenset[int]] = {}

    def walk(path: Cell, probability: float) -> Iterator[tuple[Cell, float]]:
        if len(path) == NUM_TOKENS or (path[-1:] and path[-1] in engine.parts.text.eos_ids):
            yield path, probability
            return
        likeliest = _likeliest(engine, [*prompt, *path])
        least = likeliest[:TOP_K][-1].logprob
        kept = [each for each in likeliest if each.logprob >= least]  # top-k keeps all ties
        weight = sum(exp(each.logprob) for each in kept)
        competitors[path] = _last_place(likeliest, least, 2 * noise)
        shared = 0.0
        for each in kept:
            chance = probability * exp(each.logprob) / weight
            if each.id in competitors[path]:
                shared += chance
            else:
                yield from walk((*path, each.id), chance)
        if shared:
            yield (*path, LAST_PLACE), shared

    return Reference(dict(walk((), 1.0)), competitors)


def _likeliest(engine: Engine, before: Sequence[int]) -> Sequence[Alternative]:
    with engine.without_drafting():
        result = engine.generate(before, max_tokens=1, logprobs=MAX_ALTERNATIVES)
    return result.tokens[0].alternatives


def _last_place(likeliest: Sequence[Alternative], least: float, change: float) -> frozenset[int]:
    """Return the tokens that may enter or leave the top k if their differences change by `change`.

    likeliest: the largest first. least: log probability of the last one kept.
    """
    outside = [each.logprob for each in likeliest if each.logprob < least]
    if not outside or least - outside[0] > change:
        return frozenset()
    near = (each for each in likeliest if least - change <= each.logprob <= outside[0] + change)
    return frozenset(each.id for each in near)


def missing_events(num_accepted: int, num_rejected: int, least: int) -> str:
    """Say what happened less than `least` times; "" if nothing."""
    counts = {"accepted": num_accepted, "rejected": num_rejected}
    return " and ".join(
        f"{count} of at least {least} draft tokens were {what}"
        for what, count in counts.items()
        if count < least
    )
