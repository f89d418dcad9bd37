"""The parts that make up an engine, and its connection to a learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge_spec.core.model import Forward, Model
from edge_spec.core.tree import Verdict
from edge_spec.engine.batch import Batch
from edge_spec.engine.prompt_cache import PromptCache
from edge_spec.engine.results import FinishReason, GenerationResult
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.engine_plan import EnginePlan
from edge_spec.scheduler.row_findings import RoundTimes
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from edge_spec.drafters.draft.draft_model import Draft
    from edge_spec.drafters.heads.independent import MedusaNetwork


class Learner(Protocol):
    """Learns from answers while no engine on the model is answering. Thread-safe."""

    def take(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        """Take an answer that was written to its end. Returns at once and raises nothing.

        tokens: [tokens] int64. states: [tokens, hidden_size] float32 after the target's final norm,
        where each token was chosen.
        """

    def head(self) -> MedusaNetwork | None:
        """Return a head to draft from the next answer on, besides other drafters."""

    def pause(self) -> None:
        """Pause for an answer. Returns when the model is free, at most one pass later."""

    def resume(self) -> None:
        """Resume after that answer."""

    def close(self) -> None:
        """Return once nothing uses the model any more."""


class AnswerRecorder:
    """Records one answer's tokens and the target's states that chose them, for a learner."""

    def __init__(self, learner: Learner, most_tokens: int = 2048) -> None:
        """most_tokens: limit per answer."""
        self._learner = learner
        self._most_tokens = most_tokens
        self._tokens: list[int] = []
        self._states: list[np.ndarray] = []

    def head(self) -> MedusaNetwork | None:
        return self._learner.head()

    def begin(self) -> None:
        self._tokens, self._states = [], []

    def observe(self, out: Forward, verdict: Verdict) -> None:
        """Record a round's tokens and the states of the rows that chose them."""
        if out.hidden is None or len(self._tokens) >= self._most_tokens or not verdict.tokens:
            return
        self._tokens += verdict.tokens
        self._states.append(out.hidden[list(verdict.kept)])  # a copy: the library owns the array

    def end(self, prompt: Sequence[int], result: GenerationResult) -> None:
        """Pass an answer to the learner if nobody ended it early."""
        complete = result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and self._tokens:
            tokens = np.array(self._tokens, np.int64)
            self._learner.take(prompt, tokens, np.concatenate(self._states))
        self.begin()


@dataclass(frozen=True, kw_only=True)
class EngineComponents:
    """Everything the loader puts into an engine."""

    # The model that answers; requests and snapshots are checked against it.
    name: str
    runtime: str
    model: Model
    text: ChatFormat
    grammars: GrammarCompiler
    min_rows: int = 1  # of a pass
    identity: str = ""  # changes with the model's files
    computing: str = ""  # changes with whatever may change a bit of the cache
    batch: Batch = field(default_factory=Batch)  # of all conversations on the model
    prompts: PromptCache = field(default_factory=PromptCache)  # likewise

    # Drafters and what combines them.
    batch_invariance: BatchInvariance
    speculation: Speculation
    speculation_factory: SpeculationFactory  # combines other drafters later
    drafter: str = "auto"  # names that `speculation` was made from
    drafts: Sequence[Draft] = ()  # draft models
    plan: EnginePlan | None = None  # that opened all of this

    # What is learnt from answers and kept for the next session.
    learner: Learner | None = None  # if the user asked for it
    keep_learnt: Callable[[Mapping[str, list[float]]], None] | None = None
    round_times: RoundTimes | None = None


class SharedModels:
    """Reference-counted models: the last user closes them. Thread-safe."""

    def __init__(
        self, models: Sequence[Model], batch: Batch, learner: Learner | None = None
    ) -> None:
        """batch: of the first model. learner: on these models, closed before them."""
        self._batch = batch
        self._learner = learner
        self._models = models
        self._users = 0
        self._lock = Lock()

    def acquire(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            if self._learner is not None:
                self._learner.close()
            self._batch.settle()
            for model in self._models:
                model.close()
