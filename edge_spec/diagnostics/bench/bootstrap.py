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

    values: float64 [4, prompts, repetitions]; tokens, seconds, tokens and seconds of the base.
    """

    values: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens a second: all tokens over all seconds, those of a prompt being the median over
        its repetitions."""
        tokens, seconds, _, _ = _totals(self.values)
        return float(tokens / seconds)

    @property
    def base_rate(self) -> float:
        _, _, tokens, seconds = _totals(self.values)
        return float(tokens / seconds)


def joined(strata: Sequence[Paired]) -> Paired:
    """Their prompts together."""
    return Paired(np.concatenate([each.values for each in strata], axis=1))


def speedup(strata: Sequence[Paired], seed: int = 0) -> Interval:
    """The rate of all prompts over the base's, with a 95 % confidence interval.

    The interval is the percentile bootstrap's (Efron 1979): prompts are drawn again within each
    stratum, and for each drawn prompt its repetitions, a repetition and its neighbour together.
    It tells of other prompts of these kinds on this machine, not of other machines.
    """
    generator = np.random.default_rng(seed)
    drawn = sum((_resampled(each, generator) for each in strata), np.zeros((4, 1)))
    low, high = np.quantile(_ratio(drawn), _QUANTILES)
    return Interval(float(_ratio(_totals(joined(strata).values))), float(low), float(high))


def prompt_speedups(paired: Paired) -> list[Interval]:
    """Returns for each prompt the median of its repetitions' ratios to their neighbours, and the
    least and the greatest of them. These two enclose the median of all repetitions that could have
    been made with a probability of 1 - 2 ** (1 - repetitions): 75 % for three, 97 % for six."""
    ratios = _ratio(paired.values)
    columns = (np.median(ratios, axis=1), ratios.min(axis=1), ratios.max(axis=1))
    return [Interval(*map(float, row)) for row in zip(*columns, strict=True)]


def _resampled(paired: Paired, generator: np.random.Generator) -> np.ndarray:
    """[4, draws] the totals of draws."""
    _, num_prompts, repetitions = paired.values.shape
    prompts = generator.integers(num_prompts, size=(_DRAWS, num_prompts, 1))
    chosen = generator.integers(repetitions, size=(_DRAWS, num_prompts, repetitions))
    return _totals(paired.values[:, prompts, chosen])


def _totals(values: np.ndarray) -> np.ndarray:
    """[4, ...] over prompts, of the medians over repetitions; values: [4, ..., prompts, reps]."""
    totals: np.ndarray = np.median(values, axis=-1).sum(axis=-1)
    return totals


def _ratio(totals: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_seconds = totals
    ratio: np.ndarray = tokens / seconds / (base_tokens / base_seconds)
    return ratio
