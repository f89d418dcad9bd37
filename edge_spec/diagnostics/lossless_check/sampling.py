"""The text's distribution with speculation against the exact one of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, tanh
from random import Random

from edge_spec.core.model import Progress
from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.lossless_check.statistics import Cell, Fit, fit
from edge_spec.diagnostics.lossless_check.texts import ids
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import MAX_ALTERNATIVES
from edge_spec.engine.results import Alternative, Origin

# A first draft token may be rejected, a second one after it too, and a third token is a bonus.
NUM_TOKENS = 3
TOP_K = 3
_PARAMS = SamplingParams(temperature=1.0, top_k=TOP_K)
# In random order: no model knows what comes next, and there is always something to draft.
_WORDS, _NUM_WORDS = ("red", "blue", "green"), 64
LAST_PLACE = -1  # in the place of a token
_MOST_ALLOWED = 0.25  # total variation that still shows something
_LEAST_TOLD_APART = 0.5


@dataclass(frozen=True)
class Sampling:
    """Says how draws of `num_tokens` tokens fit their exact probabilities.

    noise_bound: how far rows of another width may move the distribution, in total variation.
    noise_factor: how far a text's probability, as a logarithm. told_apart: how likely texts are
    whose three tokens are told, not just that one of them is of the last place.
    """

    num_tokens: int
    origins: dict[str, int]  # how the tokens came about
    fit: Fit
    noise_bound: float
    noise_factor: float
    told_apart: float

    @property
    def within_noise(self) -> bool:
        """Says whether the draws differ from plain ones by no more than the noise may explain."""
        return self.fit.passed_within(self.noise_factor, self.noise_bound)

    @property
    def passed(self) -> bool | None:
        """Returns None where the draws show nothing: without draft tokens, or with so much noise
        that a wrong rule could hide in it."""
        if not self.within_noise:
            return False
        if not self.num_guesses or self.told_apart < _LEAST_TOLD_APART:
            return None
        allowed = self.fit.total_variation_bound + self.noise_bound
        return True if self.fit.passed or allowed <= _MOST_ALLOWED else None

    @property
    def num_guesses(self) -> int:
        """Counts the draft tokens of which it was decided whether they are accepted."""
        return self.origins[Origin.ACCEPTED] + self.origins[Origin.RECOVERED]


@dataclass(frozen=True)
class Reference:
    """Holds what may be drawn. Where the noise may put another token into the last place that top-k
    keeps, the tokens that compete for it are one, LAST_PLACE, and end the text.

    competitors: these tokens, by the text before them.
    """

    probabilities: dict[Cell, float]
    competitors: dict[Cell, frozenset[int]]

    def cell(self, text: Cell) -> Cell:
        """The text itself, but for a token that competes for the last place."""
        for i, token in enumerate(text):
            if token in self.competitors.get(text[:i], ()):
                return (*text[:i], LAST_PLACE)
        return text


def check_sampling(engine: Engine, num_draws: int, noise: float, progress: Progress) -> Sampling:
    """Draws without a seed, so that drafts that can be sampled are, except in exact mode. All
    draft tokens are verified, whether or not that pays. noise: of a logit's distance to the
    largest."""
    prompt = _prompt(engine)
    reference = _reference(engine, prompt, noise)
    counts: Counter[Cell] = Counter()
    origins: Counter[Origin] = Counter()
    with engine.verifying_all_draft_tokens():
        for i in range(num_draws):
            if i % 32 == 0:
                progress("Sampling", i / num_draws)
            result = engine.generate(prompt, max_tokens=NUM_TOKENS, sampling=_PARAMS)
            counts[reference.cell(tuple(ids(result)))] += 1
            origins.update(token.origin for token in result.tokens)
    return Sampling(
        num_tokens=NUM_TOKENS,
        origins={origin.value: origins[origin] for origin in Origin},
        fit=fit(counts, reference.probabilities),
        noise_bound=min(1.0, NUM_TOKENS * tanh(noise / 2)),
        noise_factor=NUM_TOKENS * 2 * noise,
        told_apart=sum(p for text, p in reference.probabilities.items() if text[-1] != LAST_PLACE),
    )


def _prompt(engine: Engine) -> list[int]:
    tokens = engine.encode(" ".join(Random(0).choices(_WORDS, k=_NUM_WORDS)))
    return tokens[: engine.context_length // 2]


def _reference(engine: Engine, prompt: Sequence[int], noise: float) -> Reference:
    """TOP_K ** NUM_TOKENS texts, most of the time, by a plain step for each that can go on."""
    competitors: dict[Cell, frozenset[int]] = {}

    def walk(path: Cell, probability: float) -> Iterator[tuple[Cell, float]]:
        if len(path) == NUM_TOKENS or (path[-1:] and path[-1] in engine.parts.text.eos_ids):
            yield path, probability
            return
        likeliest = _likeliest(engine, [*prompt, *path])
        least = likeliest[:TOP_K][-1].logprob
        kept = [each for each in likeliest if each.logprob >= least]  # top-k keeps all that tie
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
    """Tokens that top-k keeps or not, depending on changes of their differences by up to `change`.
    likeliest: by what is largest first; least: what is kept at least."""
    outside = [each.logprob for each in likeliest if each.logprob < least]
    if not outside or least - outside[0] > change:
        return frozenset()
    near = (each for each in likeliest if least - change <= each.logprob <= outside[0] + change)
    return frozenset(each.id for each in near)
