"""What an engine is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_spec.control.batch_invariance import BatchInvariance
from edge_spec.core.model import Model
from edge_spec.drafters.draft.draft import Draft
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.models.pair_history import PairHistory
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.grammar import GrammarCompiler


class IdleWork(Protocol):
    """Work with the model that is done while none of the engines that share it is answering."""

    def pause(self) -> None:
        """An answer begins. Returns when the model is free, at most one pass later."""

    def resume(self) -> None:
        """That answer has ended."""

    def close(self) -> None:
        """Returns when nothing uses the model any more."""


@dataclass(frozen=True)
class EngineComponents:
    """`edge_spec.load` composes them."""

    name: str
    runtime: str
    model: Model
    text: ChatFormat
    batch_invariance: BatchInvariance
    speculation: Speculation
    speculation_factory: SpeculationFactory  # composes it again for other drafters
    grammars: GrammarCompiler
    drafter: str = "auto"  # the names that `speculation` was composed by
    min_rows: int = 1  # of a pass; more in exact mode
    drafts: Sequence[Draft] = ()  # further models, where there are any
    history: PairHistory | None = None  # of the first of them
    idle_work: IdleWork | None = None
    keep_learnt: Callable[[Mapping[str, list[float]]], None] | None = None  # for the next session
    identity: str = ""  # changes with the model's files
    computing: str = ""  # changes with whatever may change a bit of the cache
