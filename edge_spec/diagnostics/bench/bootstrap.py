"""Says how much faster one way of decoding is than another, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_DRAWS = 2000
_QUANTILES = (0.025, 0.975)


class Interval(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Holds what the same prompts took one way, and right beside it in time another: the base.

    All float64 [prompts, repetitions].
    """

    tokens: np.ndarray
    seconds: np.ndarray
    base_tokens: np.ndarray
    base_seconds: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens a second: all tokens over all seconds, those of a prompt being the median over
        its repetitions."""
        tokens, seconds = _totals(self)[:2]
        return float(tokens / seconds)

    @property
    def base_rate(self) -> float:
        tokens, seconds = _totals(self)[2:]
        return float(tokens / seconds)


def joined(strata: Sequence[Paired]) -> Paired:
    """Their prompts together."""
    names = ("tokens", "seconds", "base_tokens", "base_seconds")
    return Paired(*(np.concatenate([getattr(each, name) for each in strata]) for name in names))


def speedup(strata: Sequence[Paired], seed: int = 0) -> Interval:
    """The rate of all prompts over the base's, with a 95 % confidence interval.

    The interval is the percentile bootstrap's (Efron 1979): prompts are drawn again within each
    stratum, and for each drawn prompt its repetitions, a repetition and its neighbour together.
    It tells of other prompts of these kinds on this machine, not of other machines.
    """
    generator = np.random.default_rng(seed)
    drawn = sum((_resampled(each, generator) for each in strata), np.zeros((4, 1)))
    low, high = np.quantile(_ratio(drawn), _QUANTILES)
    return Interval(float(_ratio(_totals(joined(strata)))), float(low), float(high))


def prompt_speedups(paired: Paired) -> list[Interval]:
    """Returns for each prompt the median of its repetitions' ratios to their neighbours, and the
    least and the greatest of them. These two enclose the median of all repetitions that could have
    been made with a probability of 1 - 2 ** (1 - repetitions): 75 % for three, 97 % for six."""
    rates = paired.tokens / paired.seconds
    ratios = rates / (paired.base_tokens / paired.base_seconds)
    columns = (np.median(ratios, axis=1), ratios.min(axis=1), ratios.max(axis=1))
    return [Interval(*map(float, row)) for row in zip(*columns, strict=True)]


def _totals(paired: Paired) -> np.ndarray:
    """[4] tokens, seconds, tokens of the base, its seconds."""
    return _summed(paired.tokens, paired.seconds, paired.base_tokens, paired.base_seconds)


def _resampled(paired: Paired, generator: np.random.Generator) -> np.ndarray:
    """[4, draws] the totals of draws."""
    num_prompts, repetitions = paired.seconds.shape
    prompts = generator.integers(num_prompts, size=(_DRAWS, num_prompts, 1))
    chosen = generator.integers(repetitions, size=(_DRAWS, num_prompts, repetitions))
    values = (paired.tokens, paired.seconds, paired.base_tokens, paired.base_seconds)
    return _summed(*(value[prompts, chosen] for value in values))


def _summed(*values: np.ndarray) -> np.ndarray:
    """[4, ...] over prompts, of the medians over repetitions; values are [..., prompts, reps]."""
    return np.stack([np.median(value, axis=-1).sum(axis=-1) for value in values])


def _ratio(totals: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_seconds = totals
    ratio: np.ndarray = tokens / seconds / (base_tokens / base_seconds)
    return ratio
