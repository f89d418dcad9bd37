"""The text's distribution with speculation against the exact one of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, tanh
from random import Random

from edge_spec.asking import MAX_ALTERNATIVES
from edge_spec.engine import Engine
from edge_spec.model import Progress
from edge_spec.proof.statistics import Cell, Fit, fit
from edge_spec.proof.texts import DOMAIN, ids
from edge_spec.results import Origin
from edge_spec.sampling import SamplingParams

# A first guess may be rejected, a second one behind it too, and a third token is a bonus.
NUM_TOKENS = 3
TOP_K = 3
_PARAMS = SamplingParams(temperature=1.0, top_k=TOP_K)
# In random order: no model knows what comes next, and there is always something to guess.
_WORDS, _NUM_WORDS = ("red", "blue", "green"), 64


@dataclass(frozen=True)
class Sampling:
    """How draws of `num_tokens` tokens fit their exact probabilities.

    noise_bound: how far rows of another width may move the distribution, in total variation.
    """

    num_draws: int
    num_tokens: int
    origins: dict[str, int]  # how the tokens came about
    fit: Fit
    noise_bound: float

    @property
    def within_noise(self) -> bool:
        """Whether the draws differ from plain ones by no more than the noise may explain."""
        return self.fit.total_variation <= self.fit.total_variation_bound + self.noise_bound

    @property
    def passed(self) -> bool:
        return self.fit.passed or (self.noise_bound > 0 and self.within_noise)


def check_sampling(engine: Engine, num_draws: int, noise: float, progress: Progress) -> Sampling:
    """Draws without a seed, so that drafts that can be sampled are. All guesses are verified,
    whether or not that pays. noise: of a margin, in logits."""
    prompt = _prompt(engine)
    probabilities = dict(_walk(engine, prompt, ()))
    counts: Counter[Cell] = Counter()
    origins: Counter[Origin] = Counter()
    with engine.verifying_all_guesses():
        for i in range(num_draws):
            if i % 32 == 0:
                progress("Sampling", i / num_draws)
            result = engine.generate(prompt, max_tokens=NUM_TOKENS, sampling=_PARAMS, domain=DOMAIN)
            counts[tuple(ids(result))] += 1
            origins.update(token.origin for token in result.tokens)
    return Sampling(
        num_draws=num_draws,
        num_tokens=NUM_TOKENS,
        origins={origin.value: origins[origin] for origin in Origin},
        fit=fit(counts, probabilities),
        noise_bound=min(1.0, NUM_TOKENS * tanh(noise / 2)),
    )


def _prompt(engine: Engine) -> list[int]:
    tokens = engine.encode(" ".join(Random(0).choices(_WORDS, k=_NUM_WORDS)))
    return tokens[: engine.context_length // 2]


def _walk(engine: Engine, prompt: Sequence[int], path: Cell) -> Iterator[tuple[Cell, float]]:
    """Each text that may be drawn, and how likely it is: TOP_K ** NUM_TOKENS of them, by a plain
    step for each that can go on."""
    if len(path) == NUM_TOKENS or (path[-1:] and path[-1] in engine.parts.text.eos_ids):
        yield path, 1.0
        return
    with engine.without_drafting():
        result = engine.generate(
            [*prompt, *path], max_tokens=1, logprobs=MAX_ALTERNATIVES, domain=DOMAIN
        )
    likeliest = result.tokens[0].alternatives
    least = likeliest[:TOP_K][-1].logprob
    kept = [each for each in likeliest if each.logprob >= least]  # top-k keeps all that tie
    weights = [exp(each.logprob) for each in kept]
    for each, weight in zip(kept, weights, strict=True):
        for text, probability in _walk(engine, prompt, (*path, each.id)):
            yield text, probability * weight / sum(weights)
