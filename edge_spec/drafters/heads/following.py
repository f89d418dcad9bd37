"""Weighs what a DSpark head says of a row by the draft tokens before it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import numpy as np

from edge_spec.core.heads import DFlashHead
from edge_spec.core.transitions import Confidence, FollowsBy, Transitions
from edge_spec.drafters.draft.ahead import Path
from edge_spec.drafters.heads.independent import RowScores

_KEPT_ROWS = 1024  # of tokens: 1 MB


class TransitionWeights:
    """The parts of a head that conversations share. They are read from the head's file as they are
    asked for, a few rows for each draft token."""

    def __init__(self, transitions: Transitions | None, confidence: Confidence | None) -> None:
        self.kind = None if transitions is None else transitions.kind
        self._transitions, self._confidence = transitions, confidence
        self._row = lru_cache(_KEPT_ROWS)(self._read)

    @classmethod
    def of(cls, head: DFlashHead) -> TransitionWeights | None:
        """Returns None for a head that has none of this."""
        if head.transitions is None and head.confidence is None:
            return None
        return cls(head.transitions, head.confidence)

    def step(
        self, memory: np.ndarray | None, token: int, state: np.ndarray | None
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns what is remembered after this token, and what rows of scored tokens are
        multiplied with. state: [hidden_size] of the row that is scored."""
        row, transitions = self._row(token), self._transitions
        if transitions is None or transitions.joined is None:
            return None, row
        assert state is not None  # see `DFlashHead.keeps_states`
        weight, bias = transitions.joined
        if transitions.kind is FollowsBy.GATED:
            return None, _logistic(weight @ np.concatenate([state, row]) + bias) * row
        memory = np.zeros(transitions.rank, np.float32) if memory is None else memory
        made = weight @ np.concatenate([memory, row, state]) + bias
        gate, candidate, output = np.split(made, 3)
        opened = _logistic(gate)
        return opened * memory + (1 - opened) * np.tanh(candidate), np.tanh(output)

    def biases(self, made: np.ndarray, scored: np.ndarray) -> np.ndarray:
        """Returns what is added to the logits of scored tokens, [scored]."""
        if self._transitions is None:
            return np.zeros(len(scored), np.float32)
        biases: np.ndarray = self._transitions.scored(scored) @ made
        return biases

    def chance(self, token: int, state: np.ndarray | None) -> float | None:
        """Returns how likely the draft token after this one is to be accepted, as the head says;
        None where it does not."""
        if self._confidence is None or state is None:
            return None
        weight = self._confidence.weight
        read = state if len(weight) == len(state) else np.concatenate([state, self._row(token)])
        return float(_logistic(weight @ read + self._confidence.bias))

    def _read(self, token: int) -> np.ndarray:
        if self._transitions is None:
            return np.empty(0, np.float32)
        row: np.ndarray = self._transitions.after(np.array([token]))[0]
        return row


class Following:
    """Weighs rows in one round, after this pending token."""

    def __init__(self, weights: TransitionWeights, pending: int) -> None:
        self._weights, self._pending = weights, pending
        self._memories: dict[Path, np.ndarray | None] = {}  # after the token that ends a path

    def decided_by(self, path: Path) -> Hashable:
        """Returns what a row after these draft tokens is weighed by."""
        if self._weights.kind is FollowsBy.RECURRENT:
            return path
        return len(path), path[-1:]

    def weighed(self, row: RowScores, path: Path) -> tuple[RowScores, np.ndarray]:
        """Returns what the head says of the row after these draft tokens, and what was added to the
        logits of the row's likeliest tokens, which alone are weighed."""
        before = self._memories.get(path[:-1]) if path else None  # only RECURRENT reads it
        memory, made = self._weights.step(before, self._last(path), row.state)
        self._memories[path] = memory
        biases = self._weights.biases(made, row.likeliest)
        peak = max(0.0, float(biases.max(initial=0.0)))
        powers = row.shares * np.exp(biases - peak)
        others = max(0.0, 1 - float(row.shares.sum())) * np.exp(-peak)
        shares = powers / (powers.sum() + others)
        order = np.argsort(-shares, kind="stable")
        return row._replace(likeliest=row.likeliest[order], shares=shares[order]), biases

    def chance(self, row: RowScores, path: Path) -> float | None:
        """Returns how likely the draft token after these is to be accepted, as the head says."""
        return self._weights.chance(self._last(path), row.state)

    def _last(self, path: Path) -> int:
        return path[-1] if path else self._pending


def _logistic(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-np.clip(x, -80, None)))
    return found
