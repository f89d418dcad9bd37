"""Tries which faults an engine survives: every kind, at every call, of everything that can fail."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from edge_spec.core.model import Model
from edge_spec.core.watchdog import WatchedModel
from edge_spec.drafters import factory
from edge_spec.drafters.draft.draft import Draft
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.components import EngineComponents, SharedModels
from edge_spec.engine.engine import Engine
from edge_spec.engine.passes import OwnPasses
from edge_spec.engine.results import FinishReason, GenerationResult
from edge_spec.engine.speculation import Speculation
from edge_spec.errors import EdgeSpecError
from edge_spec.testing.faults import DRAFTER_CALLS, Fault, FaultKind, FaultyDrafter, FaultyModel

_TARGET_CALLS = ("prefill", "forward", "commit", "rollback")
_DRAFT_CALLS = (*_TARGET_CALLS, "state", "restore")
_WATCHED = ("prefill", "forward")
_AT_ONCE = tuple(kind for kind in FaultKind if kind is not FaultKind.HANGS)
_NO_MODELS: Sequence[Model] = ()


@dataclass(frozen=True)
class FaultCase:
    """drafters: names; part: which of their parts goes wrong, or the target."""

    drafters: str
    part: str
    fault: Fault
    lost: str | None  # what was wrong with the text or the engine; None: it survived

    def __str__(self) -> str:
        return f"{self.part} ({self.drafters}): {self.fault}"


@dataclass(frozen=True)
class FaultReport:
    """Tells of the faults that happened; one whose call never comes is not counted."""

    cases: tuple[FaultCase, ...]

    @property
    def injected(self) -> int:
        return len(self.cases)

    @property
    def survived(self) -> int:
        return sum(case.lost is None for case in self.cases)

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Numbers "injected" and "survived"."""
        counts = {kind.value: {"injected": 0, "survived": 0} for kind in FaultKind}
        for case in self.cases:
            counts[case.fault.kind]["injected"] += 1
            counts[case.fault.kind]["survived"] += case.lost is None
        return counts


def check_faults(
    parts: EngineComponents,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[str] = ("suffix",),
    *,
    steps: Sequence[int] = (1, 3),
    max_tokens: int = 24,
    hang_limit_s: float = 0.5,
) -> FaultReport:
    """Has everything fail that an engine of these parts asks, once each, and looks at the texts.

    Survived is a fault of a drafter, of its draft or of a part of the target where every answer is
    the one without drafters; one of the target itself where the answer ends with an EdgeSpecError
    after a beginning of the right text, and an answer after it is right again. prompts: two or
    more, none of them the beginning of another. drafters: as `Engine.set_drafter` takes them.
    steps: the calls that go wrong. hang_limit_s: what a pass of a draft may take.
    """
    matrix = _Matrix(parts, prompts, max_tokens, hang_limit_s)
    cases: list[FaultCase] = []
    for names in drafters:
        for at in steps:
            cases += matrix.drafter(names, at)
            cases += matrix.draft(names, at)
            cases += matrix.part(names, at)
            cases += matrix.target(names, at)
    return FaultReport(tuple(case for case in cases if case.fault.happened.is_set()))


class _Matrix:
    def __init__(
        self,
        parts: EngineComponents,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        hang_limit_s: float,
    ) -> None:
        self._parts = parts
        # Without costs: every drafter is asked, whether or not that pays.
        self._speculator = replace(parts.speculation_factory, costs=None)
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._hang_limit_s = hang_limit_s
        none = self._speculator.choose("none")
        with closing(self._engine(parts.model, none)) as engine:
            self._right = [self._answer(engine, prompt) for prompt in prompts]

    def drafter(self, names: str, at: int) -> Iterator[FaultCase]:
        """Each of the drafters itself."""
        setting = self._speculator.setting
        for index, name in enumerate(names.split(",")):
            for fault in _faults(DRAFTER_CALLS, _AT_ONCE, at):
                made: list[Drafter] = list(factory.load_drafters(names, setting))
                made[index] = FaultyDrafter(made[index], fault)
                speculation = self._speculator.compose(made)
                yield self._survives(names, name, fault, speculation)

    def draft(self, names: str, at: int) -> Iterator[FaultCase]:
        """The session of the first draft, for drafters that have one."""
        speculation_factory = self._speculator
        if not any(traits.draft_model for traits in factory.traits_of(names).values()):
            return
        hangs = _faults(_WATCHED, (FaultKind.HANGS,), at)
        for fault in [*_faults(_DRAFT_CALLS, _AT_ONCE, at), *hangs]:
            limit_s = self._hang_limit_s if fault.kind is FaultKind.HANGS else None
            drafts = [each.fork() for each in self._parts.drafts]
            drafts[0].close_session()
            drafts[0] = _faulty(self._parts.drafts[0], fault, limit_s)
            setting = replace(speculation_factory.setting, drafts=drafts)
            speculation = replace(speculation_factory, setting=setting).choose(names)
            try:
                yield self._survives(names, "draft", fault, speculation)
            finally:
                fault.released.set()
                for each in drafts:
                    each.close_session()

    def part(self, names: str, at: int) -> Iterator[FaultCase]:
        """The part of the target that drafts for it."""
        if not any(traits.target_layers for traits in factory.traits_of(names).values()):
            return
        for fault in _faults(_TARGET_CALLS, _AT_ONCE, at):
            model = FaultyModel(self._parts.model, [], [fault])
            speculation = self._speculator.choose(names)
            yield self._survives(names, "part", fault, speculation, model)

    def target(self, names: str, at: int) -> Iterator[FaultCase]:
        for fault in _faults(_TARGET_CALLS, _AT_ONCE, at):
            yield self._recovers(names, [fault])
        for kind in (FaultKind.RAISES, FaultKind.MEMORY):  # the session that takes its place, too
            again = Fault(kind, "open_session", 2)
            yield self._recovers(names, [again, Fault(FaultKind.RAISES, "forward", at)])

    def _survives(
        self,
        names: str,
        part: str,
        fault: Fault,
        speculation: Speculation,
        model: Model | None = None,
    ) -> FaultCase:
        """All answers, and a snapshot between them."""
        lost = None
        try:
            engine = self._engine(model or self._parts.model, speculation)
            with closing(engine), tempfile.TemporaryDirectory() as folder:
                for prompt, right in zip(self._prompts, self._right, strict=True):
                    if self._answer(engine, prompt) != right:
                        lost = "another text"
                    engine.snapshot(Path(folder) / "conversation")
                    engine.restore(Path(folder) / "conversation")
        except Exception as error:
            lost = f"{type(error).__name__}: {error}"
        return FaultCase(names, part, fault, lost)

    def _recovers(self, names: str, faults: Sequence[Fault]) -> FaultCase:
        model = FaultyModel(self._parts.model, faults)
        lost, num_errors = None, 0
        try:
            with closing(self._engine(model, self._speculator.choose(names))) as engine:
                rounds = list(zip(self._prompts, self._right, strict=True))
                for prompt, right in rounds * 2:
                    before = engine.last
                    try:
                        text = self._answer(engine, prompt)
                    except EdgeSpecError:
                        num_errors += 1
                        began = engine.last is not before  # its session could be opened
                        lost = lost or (_wrong_end(engine.last, right) if began else None)
                        continue
                    lost = lost or ("another text" if text != right else None)
                if text != right:
                    lost = "the last answer is another text"
                if num_errors > sum(each.happened.is_set() for each in faults):
                    lost = lost or f"{num_errors} answers ended with an error"
        except Exception as error:
            lost = f"{type(error).__name__}: {error}"
        return FaultCase(names, "target", faults[0], lost)

    def _engine(self, model: Model, speculation: Speculation) -> Engine:
        """One that leaves the models open."""
        parts = replace(
            self._parts,
            model=model,
            passes=OwnPasses(),
            speculation=speculation,
            drafts=(),
            history=None,
            idle_work=None,
            keep_learnt=None,
        )
        return Engine(parts, SharedModels(_NO_MODELS, OwnPasses()))

    def _answer(self, engine: Engine, prompt: Sequence[int]) -> list[int]:
        return [token.id for token in engine.generate(prompt, max_tokens=self._max_tokens).tokens]


def _wrong_end(result: GenerationResult | None, right: Sequence[int]) -> str | None:
    if result is None or result.finish_reason is not FinishReason.ERROR:
        return "no result that says that it ended with an error"
    kept = [token.id for token in result.tokens]
    return None if kept == list(right[: len(kept)]) else "another text before the error"


def _faults(calls: Sequence[str], kinds: Sequence[FaultKind], at: int) -> Iterator[Fault]:
    for call in calls:
        for kind in kinds:
            with suppress(ValueError):  # no such fault
                yield Fault(kind, call, at)


def _faulty(draft: Draft, fault: Fault, limit_s: float | None) -> Draft:
    """The same draft with a session of its own, which goes wrong."""
    other = copy(draft)
    model = FaultyModel(draft.model.watched, [fault])
    if limit_s is None:
        other.model = WatchedModel(model)
    else:
        other.model = WatchedModel(model, least_s=limit_s, first_s=limit_s)
    return other.fork()
