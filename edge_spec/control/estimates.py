"""Estimates that know how uncertain they are (Kalman 1960), of what drifts while it is not looked
at."""

from __future__ import annotations

from math import sqrt


class Level:
    """A number that changes slowly: its mean and variance."""

    def __init__(self, mean: float, variance: float) -> None:
        self.mean = mean
        self.variance = variance

    def drift(self, variance: float) -> None:
        """It may have changed."""
        self.variance += variance

    def observe(self, value: float, noise: float) -> None:
        """noise: variance of the observation."""
        gain = self.variance / (self.variance + noise)
        self.mean += gain * (value - self.mean)
        self.variance *= 1 - gain

    @property
    def deviation(self) -> float:
        return sqrt(self.variance)
