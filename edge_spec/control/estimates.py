"""Estimates that know how uncertain they are (Kalman 1960)."""

from __future__ import annotations


class Level:
    """Estimates a number by noisy observations: its mean and variance."""

    def __init__(self, mean: float, variance: float) -> None:
        self.mean = mean
        self.variance = variance

    def observe(self, value: float, noise: float) -> None:
        """noise: variance of the observation."""
        gain = self.variance / (self.variance + noise)
        self.mean += gain * (value - self.mean)
        self.variance *= 1 - gain
