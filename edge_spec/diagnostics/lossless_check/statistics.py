"""Tests whether draws come from a known distribution, at a rate of false alarms that holds for any
number of draws and any probabilities.

There are n draws of k texts; p is the probability of each text and f its share of the draws.
Relative entropy is D = sum of f ln(f / p); right draws reach n D >= t with a probability of at most
exp(k - 1 - t) (t / (k - 1))^(k - 1) (Agrawal 2020, for t > k - 1). Total variation is half the sum
of |f - p|. Its mean is at most half the sum of sqrt(p (1 - p) / n), because E|f - p| is at most the
standard deviation, and it exceeds its mean by e with a probability of at most exp(-2 n e^2)
(McDiarmid 1989).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, expm1, log

import numpy as np

FALSE_ALARM = 1e-6  # of both tests together, half of it each

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """Holds how well draws fit probabilities. divergence: n D, in nats."""

    num_draws: int
    num_cells: int
    divergence: float
    total_variation: float
    total_variation_bound: float  # right draws exceed it with a probability of FALSE_ALARM / 2
    num_impossible: int  # draws of what has no probability

    @property
    def p_value(self) -> float:
        return self._tail(self.divergence)

    @property
    def passed(self) -> bool:
        return self.passed_within(0.0, 0.0)

    def passed_within(self, change: float, distance: float) -> bool:
        """Says whether the draws may come from probabilities q that are each up to exp(change)
        times as large or as small as p, and all together at most `distance` away in total
        variation.

        D of p exceeds D of q by the sum of f ln(q / p), which is at most the sum of
        (q - p)^2 / p and of (f - q) ln(q / p).
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
    """counts: of each text that was drawn; probabilities: of each text that can be, positive."""
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
