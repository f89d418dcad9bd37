"""The connection between an engine and whoever learns from its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import Verdict
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.engine.results import FinishReason, GenerationResult


class TakesAnswers(Protocol):
    """Learns from answers. Any thread may call."""

    def take(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        """tokens: [tokens] int64 of an answer that its reader let be written to its end. states:
        [tokens, hidden_size] float32 after the target's final norm, where each was chosen. Returns
        at once, and raises nothing."""

    def head(self) -> MedusaNetwork | None:
        """Returns a head that drafts from the next answer on, beside those that do anyway."""


class AnswerRecorder:
    """Keeps the tokens of one answer and the target's states that chose them, and gives them to a
    learner."""

    def __init__(self, learner: TakesAnswers, most_tokens: int = 2048) -> None:
        """most_tokens: after which nothing more of an answer is kept."""
        self._learner = learner
        self._most_tokens = most_tokens
        self._tokens: list[int] = []
        self._states: list[np.ndarray] = []

    def head(self) -> MedusaNetwork | None:
        """Returns what the learner has for the next answer."""
        return self._learner.head()

    def begin(self) -> None:
        """Forgets what was kept: an answer begins."""
        self._tokens, self._states = [], []

    def observe(self, out: Forward, verdict: Verdict) -> None:
        """Keeps a round's tokens, and the states of the rows that chose them."""
        if out.hidden is None or len(self._tokens) >= self._most_tokens or not verdict.tokens:
            return
        self._tokens += verdict.tokens
        self._states.append(out.hidden[list(verdict.kept)])  # a copy: the array is the library's

    def end(self, prompt: Sequence[int], result: GenerationResult) -> None:
        """Gives the learner an answer that nobody ended early."""
        complete = result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and self._tokens:
            tokens = np.array(self._tokens, np.int64)
            self._learner.take(prompt, tokens, np.concatenate(self._states))
        self.begin()
