"""The components that an engine is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import Model
from edge_spec.drafters.draft.draft import Draft
from edge_spec.engine.learner_hooks import TakesAnswers
from edge_spec.engine.pass_requests import OwnPasses, Passes
from edge_spec.engine.prompt_cache import PromptCache
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.exactness.batch_invariance import BatchInvariance
from edge_spec.models.pair_history import PairHistory
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.grammar import GrammarCompiler


class IdleWork(Protocol):
    """Work with the model that is done while none of the engines that share it is answering."""

    def pause(self) -> None:
        """Stops for an answer. Returns when the model is free, at most one pass later."""

    def resume(self) -> None:
        """Goes on: that answer has ended."""

    def close(self) -> None:
        """Returns when nothing uses the model any more."""


class RoundTimes(Protocol):
    """Learns from answers what passes of the model take. Any thread may call."""

    def observe(self, round_stats: RoundStats) -> None:
        """Counts a round of a conversation that had the model to itself."""

    def end(self, num_tokens: int) -> None:
        """Counts an answer as ended, with this many tokens of text; may keep what is new."""


@dataclass(frozen=True, kw_only=True)
class TargetComponents:
    """The model that answers: what requests and snapshots are checked against."""

    name: str
    runtime: str
    model: Model
    text: ChatFormat
    grammars: GrammarCompiler
    min_rows: int = 1  # of a pass
    identity: str = ""  # changes with the model's files
    computing: str = ""  # changes with whatever may change a bit of the cache
    passes: Passes = field(default_factory=OwnPasses)  # of all conversations on the model
    prompts: PromptCache = field(default_factory=PromptCache)  # likewise


@dataclass(frozen=True, kw_only=True)
class DraftingComponents:
    """The drafters of an engine, and what composes others."""

    batch_invariance: BatchInvariance
    speculation: Speculation
    speculation_factory: SpeculationFactory  # composes it again for other drafters
    drafter: str = "auto"  # the names that `speculation` was composed by
    drafts: Sequence[Draft] = ()  # further models, where there are any


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """The work between answers, and what is kept for the next session."""

    history: PairHistory | None = None  # of the first draft
    idle_work: IdleWork | None = None
    learner: TakesAnswers | None = None  # from answers, where that was asked for
    keep_learnt: Callable[[Mapping[str, list[float]]], None] | None = None
    round_times: RoundTimes | None = None


@dataclass(frozen=True, kw_only=True)
class EngineComponents(Upkeep, DraftingComponents, TargetComponents):
    """All that an engine is composed of, by the loader. A part of the engine is given it as the
    part that it may use."""


class SharedModels:
    """Models that whoever `acquire`s them may use until all have given them back: the last one
    closes them. Any thread may call."""

    def __init__(
        self, models: Sequence[Model], passes: Passes, work: IdleWork | None = None
    ) -> None:
        """passes: over the first of them. work: on these models, ends before they are closed."""
        self._passes = passes
        self._work = work
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
            if self._work is not None:
                self._work.close()
            self._passes.settle()
            for model in self._models:
                model.close()
