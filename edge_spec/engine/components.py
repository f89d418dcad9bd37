"""The components that an engine is composed of, and its connection to whoever learns from its
answers."""

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
    """Learns from answers, while none of the engines that share the model is answering. Any thread
    may call."""

    def take(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        """tokens: [tokens] int64 of an answer that its reader let be written to its end. states:
        [tokens, hidden_size] float32 after the target's final norm, where each was chosen. Returns
        at once, and raises nothing."""

    def head(self) -> MedusaNetwork | None:
        """Returns a head that drafts from the next answer on, beside those that do anyway."""

    def pause(self) -> None:
        """Stops for an answer. Returns when the model is free, at most one pass later."""

    def resume(self) -> None:
        """Goes on: that answer has ended."""

    def close(self) -> None:
        """Returns when nothing uses the model any more."""


class AnswerRecorder:
    """Keeps the tokens of one answer and the target's states that chose them, and gives them to a
    learner."""

    def __init__(self, learner: Learner, most_tokens: int = 2048) -> None:
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


@dataclass(frozen=True, kw_only=True)
class EngineComponents:
    """All that an engine is composed of, by the loader."""

    # The model that answers: what requests and snapshots are checked against.
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

    # The drafters of an engine, and what composes others.
    batch_invariance: BatchInvariance
    speculation: Speculation
    speculation_factory: SpeculationFactory  # composes it again for other drafters
    drafter: str = "auto"  # the names that `speculation` was composed by
    drafts: Sequence[Draft] = ()  # further models, where there are any
    plan: EnginePlan | None = None  # by which all of this was opened

    # What is learnt from answers, and what is kept for the next session.
    learner: Learner | None = None  # from answers, where that was asked for
    keep_learnt: Callable[[Mapping[str, list[float]]], None] | None = None
    round_times: RoundTimes | None = None


class SharedModels:
    """Models that whoever `acquire`s them may use until all have given them back: the last one
    closes them. Any thread may call."""

    def __init__(
        self, models: Sequence[Model], batch: Batch, learner: Learner | None = None
    ) -> None:
        """batch: of the first of them. learner: on these models, ends before they are closed."""
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
