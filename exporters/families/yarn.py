"""YaRN: slow rotations are stretched, fast ones stay (Peng et al. 2023, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge_spec.core.rope import Rope


@dataclass(frozen=True)
class Yarn:
    """factor: of the context; the turns are those within the original context beyond which a pair
    stays as it is, and below which it is stretched by the whole factor."""

    factor: float
    original_context_length: int
    fast_turns: float
    slow_turns: float
    in_whole_steps: bool  # whether the ramp begins and ends at a pair

    def factors(self, theta: float, rotary_dim: int) -> tuple[float, ...]:
        """Returns what each of the rotary_dim / 2 frequencies is divided by."""
        # The pairs of a head that turn this often within the original context.
        wavelengths = (
            self.original_context_length / (turns * 2 * math.pi)
            for turns in (self.fast_turns, self.slow_turns)
        )
        low, high = (rotary_dim * math.log(each) / (2 * math.log(theta)) for each in wavelengths)
        if self.in_whole_steps:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        pairs = np.arange(len(Rope(theta).unscaled(rotary_dim)))
        stretched = np.clip((pairs - low) / (high - low or 0.001), 0.0, 1.0)
        return tuple((1 / (stretched / self.factor + 1 - stretched)).tolist())

    def magnitude(self, scale: float = 1.0) -> float:
        """Returns what cos and sin are multiplied with."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0
