"""Medusa heads (Cai et al. 2024, Medusa-1) that learn in numpy: a few minutes of one core.

Head k is z + SiLU(A z + b), scored by rows of the target's own output matrix, which stay as they
are. So the gradient is a few products, and neither PyTorch nor the target has to be there: what the
target computed was kept with the texts. Loss, discount of later positions and optimizer are those
of `edge_spec.distill`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.learning.texts import LearntText

NUM_HEADS = 3
_DISCOUNT = 0.8  # of each further position in the loss
_BETAS, _DECAY, _CLIP, _TINY = (0.9, 0.95), 0.01, 0.5, 1e-8


@dataclass(frozen=True, eq=False)
class Examples:
    """Texts beside each other.

    states: [rows, hidden_size] float16. tokens: [rows] int64, among the scored tokens, -1 where it
    is not one. ends: [rows], where each row's text ends.
    """

    states: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Teacher:
    """Computes what the target would choose among the scored tokens.

    output: [scored tokens, hidden_size] float32 rows of its output matrix. token_ids: [scored
    tokens] int64, ascending.
    """

    config: ModelConfig
    output: np.ndarray
    token_ids: np.ndarray

    def probabilities(self, states: np.ndarray) -> np.ndarray:
        """[rows, scored tokens] float32, renormalised over these. states: [rows, hidden_size]."""
        logits = states @ self.output.T * np.float32(self.config.logit_scale)
        cap = self.config.logit_softcap
        if cap is not None:
            logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
        return _softmax(logits)

    def examples(self, texts: Sequence[LearntText]) -> Examples:
        states = np.concatenate([each.states for each in texts])
        tokens = np.concatenate([each.tokens for each in texts])
        at = np.minimum(np.searchsorted(self.token_ids, tokens), len(self.token_ids) - 1)
        scored = np.where(self.token_ids[at] == tokens, at, -1)
        ends = np.cumsum([len(each.tokens) for each in texts])
        return Examples(states, scored, np.repeat(ends, [len(each.tokens) for each in texts]))


@dataclass(eq=False)
class Heads:
    """parameters: float32, by the names that files have; moments: of the optimizer, two a
    parameter, in one array [2, ...]."""

    parameters: dict[str, np.ndarray]
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0  # of the optimizer

    @classmethod
    def untrained(cls, hidden_size: int, count: int = NUM_HEADS) -> Heads:
        """Each begins as the target's own choice."""
        parameters: dict[str, np.ndarray] = {}
        for head in range(count):
            parameters[weight_name(head)] = np.zeros((hidden_size, hidden_size), np.float32)
            parameters[bias_name(head)] = np.zeros(hidden_size, np.float32)
        return cls(parameters)

    @property
    def count(self) -> int:
        return len(self.parameters) // 2

    def copy(self) -> dict[str, np.ndarray]:
        return {name: values.copy() for name, values in self.parameters.items()}

    def learn(self, teacher: Teacher, examples: Examples, rows: np.ndarray, rate: float) -> float:
        """One step of AdamW on these rows. Returns their loss."""
        loss, gradients = self._gradients(teacher, examples, rows)
        norm = float(np.sqrt(sum(float(np.vdot(each, each)) for each in gradients.values())))
        scale = min(1.0, _CLIP / max(norm, _TINY))
        self.step += 1
        for name, gradient in gradients.items():
            self._update(name, gradient * np.float32(scale), rate)
        return loss

    def loss(self, teacher: Teacher, examples: Examples, rows: np.ndarray) -> float:
        """Cross entropy to the target's own choices, mean over rows, later heads discounted."""
        return sum(each.weight * each.loss for each in self._passes(teacher, examples, rows))

    def _gradients(
        self, teacher: Teacher, examples: Examples, rows: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        loss, gradients = 0.0, {}
        for each in self._passes(teacher, examples, rows):
            loss += each.weight * each.loss
            missed = each.likely - each.expected
            missed *= np.float32(each.weight / len(missed))
            after = missed @ teacher.output  # of the head's state
            after *= _silu_slope(each.inner)
            gradients[weight_name(each.head)] = after.T @ each.states
            gradients[bias_name(each.head)] = after.sum(axis=0)
        return loss, gradients

    def _passes(self, teacher: Teacher, examples: Examples, rows: np.ndarray) -> Iterator[_Pass]:
        """Yields the pass of each head, over the rows whose text goes on to a token that it may
        draft."""
        for head in range(self.count):
            ahead = rows + head + 1
            there = ahead < examples.ends[rows]
            there[there] = examples.tokens[ahead[there]] >= 0
            if not there.any():
                continue
            states = examples.states[rows[there]].astype(np.float32)
            expected = teacher.probabilities(examples.states[ahead[there]].astype(np.float32))
            inner = states @ self.parameters[weight_name(head)].T
            inner += self.parameters[bias_name(head)]
            likely = _softmax((states + _silu(inner)) @ teacher.output.T)
            yield _Pass(head, states, inner, likely, expected)

    def _update(self, name: str, gradient: np.ndarray, rate: float) -> None:
        """AdamW (Loshchilov and Hutter 2019)."""
        values = self.parameters[name]
        if name not in self.moments:
            self.moments[name] = np.zeros((2, *values.shape), np.float32)
        mean, square = self.moments[name]
        for moment, beta, new in ((mean, _BETAS[0], gradient), (square, _BETAS[1], gradient**2)):
            moment *= np.float32(beta)
            moment += np.float32(1 - beta) * new
        corrections = [1 - beta**self.step for beta in _BETAS]
        change = mean / np.float32(corrections[0])
        change /= np.sqrt(square / np.float32(corrections[1])) + np.float32(_TINY)
        values *= np.float32(1 - rate * _DECAY)
        values -= np.float32(rate) * change


@dataclass(frozen=True, eq=False)
class _Pass:
    head: int
    states: np.ndarray  # [rows, hidden_size]
    inner: np.ndarray  # likewise
    likely: np.ndarray  # [rows, scored tokens]
    expected: np.ndarray  # likewise

    @property
    def weight(self) -> float:
        return _DISCOUNT**self.head

    @property
    def loss(self) -> float:
        scores = np.log(np.maximum(self.likely, np.float32(1e-30)))
        return float(-np.einsum("rv,rv->r", self.expected, scores).mean())


def weight_name(head: int) -> str:
    return f"{head}.0.linear.weight"


def bias_name(head: int) -> str:
    return f"{head}.0.linear.bias"


def _softmax(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.exp(logits - logits.max(axis=1, keepdims=True))
    found /= found.sum(axis=1, keepdims=True)
    return found


def _sigmoid(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-np.clip(values, -80, None)))
    return found


def _silu(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = values * _sigmoid(values)
    return found


def _silu_slope(values: np.ndarray) -> np.ndarray:
    sigmoid = _sigmoid(values)
    found: np.ndarray = sigmoid * (1 + values * (1 - sigmoid))
    return found
