"""Sampling parameters and their ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any

from edge_spec.errors import UsageError

LEAST_PENALTY = 0.01  # of repetitions: dividing by less overflows float32
_NO_BIAS: Mapping[int, float] = {}


def is_number(value: Any) -> bool:
    """Return whether this is a real number (numpy's included), not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Return whether this is an integer (numpy's included), not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_biases(value: Any) -> bool:
    return all(is_whole(token) and is_number(bias) and bias < inf for token, bias in value.items())


_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: value >= 0, "0 or more"),
    "top_k": (lambda value: is_whole(value) and value >= 0, "0 (all tokens) or more, and whole"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value < 1, "from 0 up to 1"),
    "repetition_penalty": (lambda value: value >= LEAST_PENALTY, f"{LEAST_PENALTY} or more"),
    "presence_penalty": (isfinite, "a finite number"),
    "frequency_penalty": (isfinite, "a finite number"),
    "logit_bias": (_are_biases, "a bias by token id, each below infinity"),
    "seed": (
        lambda value: value is None or (is_whole(value) and 0 <= value < 2**64),
        "0 or more, below 2**64 and whole",
    ),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Raises UsageError for a value out of range.

    Temperature 0 takes the most probable token. Otherwise logits are processed in this order: bias,
    penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # above 1, tokens of prompt and output become less likely
    presence_penalty: float = 0.0  # subtracted from logits of the output's tokens
    frequency_penalty: float = 0.0  # the same, multiplied by a token's count
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None  # None: a fresh one each time

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _VALID.items():
            value = getattr(self, name)
            try:
                valid = not isinstance(value, bool) and is_valid(value)
            except (AttributeError, TypeError):
                valid = False
            if not valid:
                raise UsageError(f"{name} is {value!r}", remedy=f"It has to be {expected}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def raw(self) -> bool:
        """Return whether logits are used unchanged."""
        return not (self.penalized or self.logit_bias)
