"""Makes a plan: every place is measured, texts are recorded once, each way to draft is replayed on
them at the costs of each place, of a draft model with each of the two at each of its places, and
the ways are ranked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from edge_spec.core.model import Progress
from edge_spec.core.modes import LosslessMode
from edge_spec.drafters import factory
from edge_spec.errors import DeviceError, EdgeSpecError, UsageError, readable
from edge_spec.models import runtimes
from edge_spec.models.devices import Device, format_bytes
from edge_spec.models.options import LoadOptions, share_chip
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidates, described
from edge_spec.placement.gains import (
    Pair,
    default_drafter,
    plain_rate,
    replay_drafters,
    row_share,
    with_draft,
)
from edge_spec.placement.place_work import (
    MEASURE_S,
    PAIR,
    READ_S,
    WRITE_S,
    MeasuredPlace,
    PlaceError,
    Surveyor,
    attempt,
    measure_pair,
    preferred,
    processor_first,
    record_texts,
)
from edge_spec.placement.replay import Recording
from edge_spec.placement.trial import TRIAL_S, Trial, Trials
from edge_spec.scheduler.plan_file import Placement, Plan
from edge_spec.scheduler.profile import PairFindings, load_pair, profile_key, save_pair
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts
from edge_spec.text.vocabulary import same_vocabulary

_PROBED = 3  # pairs on several devices, the best by what each model takes alone

_Hits = Sequence[Sequence[bool]]


@dataclass(frozen=True)
class _Forecast:
    target: MeasuredPlace
    draft: MeasuredPlace
    hits: _Hits
    placement: Placement


@dataclass
class Pairing:
    """A target and a model that drafts for it."""

    source: Source
    draft: Source
    surveyor: Surveyor
    progress: Progress

    def placements(
        self, targets: Sequence[MeasuredPlace], recordings: Sequence[Recording]
    ) -> list[Placement]:
        """Returns a placement of each two places. The best of the pairs that a device takes part in
        are measured together. What a target gives up to take turns is left to trials to tell."""
        options = LoadOptions(draft=(self.draft.model,))
        targets = [_taking_turns(each) for each in targets]
        drafts = self.surveyor.survey(self.draft, options, "draft: ")
        if not targets or not self._can_draft(targets[0], drafts):
            return []
        read = list(self._read(drafts, recordings))
        found = [
            self._forecast(target, draft, hits, recordings)
            for target, (draft, hits) in product(targets, read)
        ]
        return [each.placement for each in self._probed(found, recordings)]

    def _can_draft(self, target: MeasuredPlace, drafts: Sequence[MeasuredPlace]) -> bool:
        reader = next(processor_first(drafts), None)
        if reader is None:
            failed = all(self.surveyor.faults.of(each.candidate) for each in drafts)
            why = "runs nowhere here" if failed else "does not fit"
            self.surveyor.notes.append(f"draft: {self.draft.name} {why}")
            return False
        vocabularies = (each.candidate.prepared.vocabulary() for each in (target, reader))
        if not same_vocabulary(*vocabularies):
            self.surveyor.notes.append(
                f"draft: {self.draft.name} has other tokens: there is no forecast"
            )
            return False
        return True

    def _read(
        self, drafts: Sequence[MeasuredPlace], recordings: Sequence[Recording]
    ) -> Iterator[tuple[MeasuredPlace, _Hits]]:
        """Gives what each place drafts of the texts. Places of the processor are as good as its
        first; a device reads for itself: it may compute wrong, which its acceptance then says."""
        known: _Hits | None = None
        for draft in processor_first(drafts):
            place = draft.candidate
            hits = None if place.is_risky else known
            if hits is None:
                what = f"Reading the texts with the draft on {place.place}"
                work = partial(preferred, place, recordings)
                hits = self.surveyor.tried(what, place, work, "draft: ")
                if hits is None:
                    continue
            if not place.is_risky:
                known = hits
            yield draft, hits
        none = [[False] * len(each.tokens) for each in recordings]
        yield from ((each, none) for each in drafts if each.profile is None and not each.fault)

    def _forecast(
        self,
        target: MeasuredPlace,
        draft: MeasuredPlace,
        hits: _Hits,
        recordings: Sequence[Recording],
        findings: PairFindings | None = None,
    ) -> _Forecast:
        on, drafting = target.candidate, draft.candidate
        plain = Placement(on.place, drafting.place, "draft-model", loss=on.prepared.loss)
        placement = self.surveyor.room.with_memory(plain, on, drafting, self.draft.model)
        if target.profile is not None and draft.profile is not None:
            findings = findings or load_pair(on.key, drafting.key)
            has_devices = not share_chip(on.key.device.split(","), drafting.key.device.split(","))
            costs = Pair(target.profile, draft.profile, findings, has_devices)
            lossless = None if target.rows is None else target.rows.lossless(LosslessMode.AUTO)
            placement = with_draft(placement, costs, recordings, hits, lossless)
            if lossless is not None:
                placement = replace(placement, lossless=lossless.describe())
        return _Forecast(target, draft, hits, placement)

    def _probed(
        self, found: Sequence[_Forecast], recordings: Sequence[Recording]
    ) -> Iterator[_Forecast]:
        """All but the pairs that fail together."""
        worth = [each for each in found if self._is_worth_probing(each)]
        worth.sort(key=lambda each: each.placement.tokens_per_s or 0.0, reverse=True)
        chosen = worth[:_PROBED]
        for each in found:
            if each not in chosen:
                yield each
                continue
            try:
                yield self._forecast(
                    each.target, each.draft, each.hits, recordings, self._measured(each)
                )
            except PlaceError as error:
                self.surveyor.notes.append(f"{each.placement}: {error}")

    def _is_worth_probing(self, pair: _Forecast) -> bool:
        candidates = pair.target.candidate, pair.draft.candidate
        return (
            pair.placement.tokens_per_s is not None
            and any(each.is_risky for each in candidates)
            and pair.placement.shortage(self.surveyor.room.free) is None
            and load_pair(*(each.key for each in candidates)) is None
        )

    def _measured(self, pair: _Forecast) -> PairFindings:
        """Raises PlaceError."""
        target, draft = pair.target.candidate, pair.draft.candidate
        what = f"Measuring {target.place} beside {draft.place}"
        self.progress(what, 0.0)
        found: PairFindings = PAIR.validate_python(
            attempt(
                measure_pair,
                target,
                described(draft.source.model, draft.device, draft.options),
                partial(self.progress, what),
                others=(draft,),
            )
        )
        self.progress(what, 1.0)
        save_pair(target.key, draft.key, found)
        return found


def _taking_turns(target: MeasuredPlace) -> MeasuredPlace:
    """Returns it as it is opened beside a draft, under whose key both are known together."""
    alone = target.candidate
    options = replace(alone.options, takes_turns=True)
    key = profile_key(alone.source, alone.prepared, options)
    return replace(target, candidate=replace(alone, options=options, key=key))


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
