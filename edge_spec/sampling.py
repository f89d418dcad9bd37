"""From logits to tokens: processing, probabilities and seeded draws."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import numpy as np

from edge_spec.errors import UsageError

_NO_BIAS: Mapping[int, float] = {}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Raises UsageError for a value out of its range.

    Temperature 0 takes the most probable token. Otherwise logits are processed in this order:
    bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # > 1 makes every token of prompt and output less likely
    presence_penalty: float = 0.0  # subtracted from the logit of every token of the output
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None  # None: a fresh one each time

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "from 0 up to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", isfinite(self.presence_penalty), "a finite number"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "0 or more and below 2**64"),
        ):
            if not valid:
                raise UsageError(
                    f"{name} is {getattr(self, name)}", remedy=f"It has to be {expected}."
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def raw(self) -> bool:
        """Whether logits can be used as the model gave them."""
        return not (self.penalized or self.logit_bias)


class Draws:
    """Uniform numbers in [0, 1), one for each position, independent of the order of asking.

    A number that belongs to its position makes sampled text the same with and without
    speculation for one seed. Streams with other purposes are independent (Philox keys).
    """

    def __init__(self, seed: int, purpose: int = 0) -> None:
        key = np.array([seed, purpose], np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._drawn = np.empty(0)

    def at(self, position: int) -> float:
        while position >= len(self._drawn):
            self._drawn = np.concatenate([self._drawn, self._generator.random(256)])
        return float(self._drawn[position])


class Choice(NamedTuple):
    token: int
    near_tie: bool  # greedy: another token was within the model's numeric noise


class Sampler:
    """Chooses the tokens of one generation; owns its penalties' history and its random draws.

    `tie_margin` is the logit margin below which a choice may depend on how many rows were scored
    together (Numerics.tie_margin), 0 where no choice can.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], tie_margin: float = 0.0
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_chosen = 0
        self._draws = Draws(self.seed)
        self._tie_margin = tie_margin
        self._prompt = frozenset(prompt) if params.penalized else frozenset()
        self._output: set[int] = set()

    def observe(self, tokens: Iterable[int]) -> None:
        """Adds tokens that are now part of the output."""
        for token in tokens:
            self.num_chosen += 1
            if self.params.penalized:
                self._output.add(token)

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> Choice:
        """The token after the output and `path`, the row's own guessed tokens.

        logits: [vocab] float32, not modified.
        """
        if not self.params.raw:
            logits = self._processed(logits, path)
        if self.params.greedy:
            token = int(logits.argmax())
            if not self._tie_margin:
                return Choice(token, near_tie=False)
            close = np.count_nonzero(logits >= logits[token] - self._tie_margin)
            return Choice(token, bool(close > 1))
        probabilities = target_probs(logits, self.params)
        draw = self._draws.at(self.num_chosen + len(path))
        return Choice(_pick(probabilities, draw), near_tie=False)

    def _processed(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        params = self.params
        logits = logits.copy()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if params.penalized:
            output = self._output.union(path)
            seen = np.fromiter(output | self._prompt, np.int64)
            # Keskar et al. 2019 (CTRL), section 4.1: divide where positive, multiply elsewhere.
            logits[seen] = np.where(
                logits[seen] > 0,
                logits[seen] / params.repetition_penalty,
                logits[seen] * params.repetition_penalty,
            )
            logits[np.fromiter(output, np.int64)] -= params.presence_penalty
        return logits


def target_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[vocab] float64 probabilities after temperature, top-k, top-p and min-p.

    top-k and top-p keep every token that ties with the last one kept, so that the result does
    not depend on the order of equal logits.
    """
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -params.top_k)[-params.top_k]] = -np.inf
    probabilities: np.ndarray = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        descending = np.sort(probabilities)[::-1]
        last = int(np.searchsorted(descending.cumsum(), params.top_p * (1 - 1e-12)))
        probabilities[probabilities < descending[min(last, len(descending) - 1)]] = 0
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    return probabilities


def _pick(probabilities: np.ndarray, draw: float) -> int:
    """Inverse transform: the first token whose cumulative probability exceeds `draw`."""
    cumulative = probabilities.cumsum()
    token = int(cumulative.searchsorted(draw * cumulative[-1], side="right"))
    if token == len(cumulative):  # rounded up to the whole
        return int(np.flatnonzero(probabilities)[-1])
    return token
