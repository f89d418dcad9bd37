"""Makes a plan: every place is measured, texts are recorded once, each way to draft is replayed on
them at the costs of each place, and the ways are ranked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.errors import DeviceError, EdgeSpecError, UsageError, readable
from edge_spec.exactness.sharing import LosslessMode
from edge_spec.fitting.devices import Device
from edge_spec.fitting.memory import format_bytes
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidates
from edge_spec.placement.gains import default_drafter, plain_rate, replay_drafters, row_share
from edge_spec.placement.pairing import Pairing
from edge_spec.placement.place_work import (
    READ_S,
    WRITE_S,
    PlaceError,
    preferred,
    record_texts,
)
from edge_spec.placement.plan import Placement, Plan
from edge_spec.placement.replay import Recording
from edge_spec.placement.survey import MEASURE_S, MeasuredPlace, Surveyor, processor_first
from edge_spec.placement.trial import TRIAL_S, Trial, Trials
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts


class Schedule:
    """Tells with every step how long the whole will take, at most about. stages: their seconds, in
    their order."""

    def __init__(
        self,
        progress: Progress,
        stages: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._left = dict(stages)
        self._stage_s = 0.0  # of the current stage
        self._begun_s = clock()

    def enter(self, stage: str) -> None:
        """The stages before this one are done, however long they took."""
        while stage in self._left:
            self._stage_s = self._left.pop(next(iter(self._left)))
        self._begun_s = self._clock()

    def __call__(self, what: str, fraction: float) -> None:
        here_s = max(0.0, self._stage_s - (self._clock() - self._begun_s))
        left_s = here_s + sum(self._left.values())
        self._progress(f"{what} (the plan takes about {left_s:.0f} s more)", fraction)


_LEAST_AGREEING = 0.25  # of a text's tokens; other weights and kernels agree on most
_READ_TEXTS = 2
_REPLAY_S = 8.0  # of all drafters at a few places


@dataclass
class Planner:
    """Plans for one model, and perhaps another that drafts for it.

    notes: a line for each place or drafter without a forecast, or with an uncertain one.
    is_certain: whether all forecasts are, so that the plan is worth keeping; known after `make`.
    trial: tries the best ones for real. refresh: measures again what the cache knows.
    """

    source: Source
    draft: Source | None
    devices: Sequence[Device]
    progress: Progress
    trial: Trial
    refresh: bool = False

    def __post_init__(self) -> None:
        self.progress = self._schedule = Schedule(self.progress, self._stages())
        self._surveyor = Surveyor(self.devices, self.progress, self.refresh)
        self.notes = self._surveyor.notes
        self._tried_well = True

    @property
    def is_certain(self) -> bool:
        return self._surveyor.is_certain and self._tried_well

    def make(self) -> Plan:
        """Raises an EdgeSpecError where nothing can run or nothing fits, OSError."""
        self._schedule.enter("survey")
        measured = self._surveyor.survey(self.source, LoadOptions())
        self._schedule.enter("record")
        writer, recordings = self._recorded(measured)
        targets = [each for each in measured if self._computes_right(each, writer, recordings)]
        self._schedule.enter("replay")
        found = [each for target in targets for each in self._alone(target, recordings)]
        if self.draft is not None:
            self._schedule.enter("pair")
            pairing = Pairing(self.source, self.draft, self._surveyor, self.progress)
            found += pairing.placements(targets, recordings)
        defaults = {
            each.candidate.place: default_drafter(each.profile) for each in targets if each.profile
        }
        free = self._surveyor.room.free
        trials = Trials(self.trial, free, defaults, recordings, self.progress, self.notes)
        self._schedule.enter("trial")
        settled = trials.settle(found)
        self._tried_well = trials.is_certain
        return Plan(
            version=1,
            model=readable(self.source.model),
            identity=self.source.identity,
            draft=self.draft.model if self.draft else None,
            draft_identity=self.draft.identity if self.draft else None,
            placements=settled,
            notes=tuple(self.notes),
            places=tuple(self._surveyor.places),
            made_by=_own_version(),
        )

    def _stages(self) -> dict[str, float]:
        """Seconds that each stage takes at most of a model that fills its share of the time."""
        stages = {"survey": MEASURE_S, "record": READ_S + WRITE_S, "replay": _REPLAY_S}
        if self.draft is not None:
            stages["pair"] = MEASURE_S + READ_S
        return stages | {"trial": TRIAL_S}

    def still_holds(self, plan: Plan) -> bool:
        """Says whether a plan of these models was made by this version of the places that are here
        now, with their libraries and kernels, and whether its best fits memory. Nothing is opened.
        Raises as `make` does for models that can run nowhere."""
        if plan.made_by != _own_version() or self.refresh:
            return False
        found = [(self.source, LoadOptions(), False)]
        if self.draft is not None:
            found.append((self.draft, LoadOptions(draft=(self.draft.model,)), True))
        here = [
            each.place
            for source, options, is_draft in found
            for each in candidates(source, options, self.devices, self.progress, is_draft=is_draft)[
                0
            ]
        ]
        fits = plan.placements[0].shortage(self._surveyor.room.free) is None
        return fits and Counter(here) == Counter(plan.places)

    def _recorded(self, measured: Sequence[MeasuredPlace]) -> tuple[MeasuredPlace, list[Recording]]:
        """Texts, and the place that wrote them: the processor, where it can. Raises an
        EdgeSpecError where no place can."""
        prompts = read_prompts(OWN_PROMPTS, per_category=1)
        for place in processor_first(measured):
            assert place.profile is not None
            try:
                texts = record_texts(place.candidate, prompts, place.profile, self.progress)
                return place, texts
            except PlaceError as error:
                self._surveyor.fail(place.candidate, error)
        if any(self._surveyor.faults.of(each.candidate) for each in measured):
            raise DeviceError(
                f"{self.source.name} runs nowhere here: {'; '.join(self._surveyor.reasons)}",
                remedy="See edge-spec devices, or choose a smaller model.",
            )
        free = format_bytes(self._surveyor.room.free.main or 0)
        raise UsageError(
            f"{self.source.name} fits nowhere: {free} are free",
            remedy="Free memory, or choose a smaller model or quantization.",
        )

    def _computes_right(
        self, place: MeasuredPlace, writer: MeasuredPlace, recordings: Sequence[Recording]
    ) -> bool:
        """Has a device read what the processor wrote; False also for a place that has failed."""
        if self._surveyor.faults.of(place.candidate) is not None:
            return False
        is_judged = place.candidate.is_risky and not writer.candidate.is_risky
        if place.profile is None or not is_judged:
            return True
        what = f"Checking {place.candidate.place}"
        work = partial(preferred, place.candidate, recordings[:_READ_TEXTS])
        found = self._surveyor.tried(what, place.candidate, work)
        if found is None:
            return False
        right = [each for hits in found for each in hits]
        share = sum(right) / max(1, len(right))
        if share < _LEAST_AGREEING:
            wrong = f"it computes wrong: {share:.0%} of its tokens are {writer.candidate.place}'s"
            self._surveyor.fail(place.candidate, PlaceError(wrong))
        return share >= _LEAST_AGREEING

    def _alone(self, target: MeasuredPlace, recordings: Sequence[Recording]) -> Iterator[Placement]:
        """No speculation, and every drafter that needs nothing but the text."""
        candidate, profile = target.candidate, target.profile
        plain = Placement(candidate.place, None, "none", loss=candidate.prepared.loss)
        plain = self._surveyor.room.with_memory(plain, candidate)
        if profile is None:
            yield plain
            return
        lossless = None if target.rows is None else target.rows.lossless(LosslessMode.AUTO)
        rate = plain_rate(profile, recordings, lossless)
        plain = replace(plain, step_s=1 / plain_rate(profile, recordings))
        if lossless is not None:
            plain = replace(plain, lossless=lossless.describe())
        yield replace(plain, tokens_per_s=rate)
        names = list(_alone_or_together())
        what = f"Replaying drafters on {candidate.place}"
        for i, name in enumerate(names):
            self.progress(what, i / len(names))
            try:
                stats = replay_drafters(name, candidate.prepared, profile, recordings, lossless)
            except EdgeSpecError as error:
                self.notes.append(f"{name}: {error.shown}")
                continue
            tokens_per_s = sum(each.predicted_n for each in stats) / (
                sum(each.predicted_ms for each in stats) / 1e3
            )
            verified = sum(each.draft_n for each in stats)
            accepted = sum(each.draft_n_accepted for each in stats)
            yield replace(
                plain,
                drafter=name,
                tokens_per_s=tokens_per_s,
                acceptance=accepted / verified if verified else None,
                row_share=row_share(profile),
            )
        self.progress(what, 1.0)


def _own_version() -> str:
    return runtimes.library_version(runtimes.REFERENCE)


def _alone_or_together() -> Iterator[str]:
    """The drafters that need nothing but the text, and those of them that may share a tree."""
    found = factory.installed_traits()
    alone = {name: traits for name, traits in found.items() if traits.needs_text_alone}
    yield from alone
    for name, traits in alone.items():
        yield from (f"{other},{name}" for other in traits.planned_with if other in alone)
