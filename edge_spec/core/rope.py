"""Rotary position embeddings: the frequencies that rotate queries and keys."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies differ from theta ** (-2i / rotary_dim).

    `linear` divides all by `factor`; `llama3` divides slow ones and blends in between (Llama 3.1,
    "The Llama 3 Herd of Models", 2024, section 3.4.2); `factors` divides each by its entry, as in
    GGUF files. cos and sin are multiplied by `magnitude`.
    """

    kind: str  # "linear" | "llama3" | "factors"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    factors: tuple[float, ...] = ()
    _: KW_ONLY
    magnitude: float = 1.0

    def divisors(self, frequencies: np.ndarray) -> np.ndarray:
        if self.kind == "linear":
            return np.full_like(frequencies, self.factor)
        if self.kind == "factors":
            return np.array(self.factors)
        turns = self.original_context_length * frequencies / (2 * np.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        divisors: np.ndarray = 1 / (smooth + (1 - smooth) / self.factor)
        return divisors


@dataclass(frozen=True)
class Rope:
    """One set of frequencies (Su et al. 2021, RoFormer)."""

    theta: float
    scaling: RopeScaling | None = None

    def unscaled(self, rotary_dim: int) -> np.ndarray:
        """Return [rotary_dim / 2] float64, radians a position, before scaling."""
        exponents = -np.arange(0, rotary_dim, 2) / rotary_dim
        frequencies: np.ndarray = np.power(self.theta, exponents)
        return frequencies

    def frequencies(self, rotary_dim: int) -> np.ndarray:
        """Return [rotary_dim / 2] float64, radians a position."""
        frequencies = self.unscaled(rotary_dim)
        if self.scaling is not None:
            frequencies /= self.scaling.divisors(frequencies)
        return frequencies

    def tables(self, num_positions: int, rotary_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin, each [num_positions, rotary_dim / 2] float32."""
        angles = np.arange(num_positions)[:, None] * self.frequencies(rotary_dim)[None]
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
        return cos.astype(np.float32), sin.astype(np.float32)
