"""Makes a plan: every place is measured, texts are recorded once, each way to draft is replayed on
them at the costs of each place, and the ways are ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.errors import DeviceError, EdgeSpecError, UsageError
from edge_spec.exactness.lossless import LosslessMode
from edge_spec.fitting.devices import Device
from edge_spec.fitting.forecast import FreeMemory
from edge_spec.fitting.memory import format_bytes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.gains import plain_rate, replay_drafters, row_share
from edge_spec.placement.pairing import Pairing
from edge_spec.placement.place_work import PlaceError, preferred, record_texts
from edge_spec.placement.plan import Placement, Plan
from edge_spec.placement.replay import Recording
from edge_spec.placement.survey import MeasuredPlace, Surveyor, processor_first
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

_LEAST_AGREEING = 0.25  # of a text's tokens; other weights and kernels agree on most
_READ_TEXTS = 2

_FEW_RIGHT = 0.4  # of a drafter's draft tokens
_SLOWER_STEP = 1.03  # times the best one's
_MOST_LOSS = 0.005  # nats a token beyond the least: half a percent of perplexity


@dataclass
class Planner:
    """Plans for one model, and perhaps another that drafts for it.

    notes: a line for each place or drafter without a forecast, or with an uncertain one.
    is_certain: whether all forecasts are, so that the plan is worth keeping; known after `make`.
    refresh: measures again what the cache knows.
    """

    source: Source
    draft: Source | None
    devices: Sequence[Device]
    progress: Progress
    refresh: bool = False

    def __post_init__(self) -> None:
        self._surveyor = Surveyor(self.devices, self.progress, self.refresh)
        self.notes = self._surveyor.notes

    @property
    def is_certain(self) -> bool:
        return self._surveyor.is_certain

    def make(self) -> Plan:
        """Raises an EdgeSpecError where nothing can run or nothing fits, OSError."""
        measured = self._surveyor.survey(self.source, LoadOptions())
        writer, recordings = self._recorded(measured)
        targets = [each for each in measured if self._computes_right(each, writer, recordings)]
        found = [each for target in targets for each in self._alone(target, recordings)]
        if self.draft is not None:
            pairing = Pairing(self.source, self.draft, self._surveyor, self.progress)
            found += pairing.placements(recordings)
        return Plan(
            version=1,
            model=self.source.model,
            identity=self.source.identity,
            draft=self.draft.model if self.draft else None,
            draft_identity=self.draft.identity if self.draft else None,
            placements=ranked(found, self._surveyor.room.free),
            notes=tuple(self.notes),
        )

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
        if lossless is not None:
            plain = replace(plain, lossless=lossless.describe())
        yield replace(plain, tokens_per_s=rate, speedup=1.0)
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
                speedup=tokens_per_s / rate,
                acceptance=accepted / verified if verified else None,
                row_share=row_share(profile),
            )
        self.progress(what, 1.0)


def _alone_or_together() -> Iterator[str]:
    """The drafters that need nothing but the text, and those of them that may share a tree."""
    found = factory.installed_traits()
    alone = {name: traits for name, traits in found.items() if traits.needs_text_alone}
    yield from alone
    for name, traits in alone.items():
        yield from (f"{other},{name}" for other in traits.planned_with if other in alone)


def ranked(placements: Sequence[Placement], free: FreeMemory) -> tuple[Placement, ...]:
    """Sorts them: the fastest that fits and whose weights say what the model's say comes first,
    each other one has the reason it lost by. A drafter that keeps answers is never chosen: that has
    to be asked for."""
    least = min((each.loss for each in placements if each.loss is not None), default=0.0)

    def is_close(placement: Placement) -> bool:
        return placement.loss is None or placement.loss - least <= _MOST_LOSS

    def may_run(placement: Placement) -> tuple[bool, bool, bool]:
        return (
            not factory.remembers(placement.drafter),
            placement.shortage(free) is None,
            is_close(placement),
        )

    def worth(placement: Placement) -> tuple[tuple[bool, bool, bool], float]:
        return may_run(placement), placement.tokens_per_s or 0.0

    best, *others = sorted(placements, key=worth, reverse=True)
    return best, *(
        replace(each, reason=_reason(each, best, free, is_close(each))) for each in others
    )


def _reason(each: Placement, best: Placement, free: FreeMemory, is_close: bool) -> str:
    shortage = each.shortage(free)
    if shortage is not None:
        return f"does not fit: {shortage}"
    if each.tokens_per_s is None:  # there was less when it was to be measured
        return f"does not fit: {format_bytes(each.memory_bytes or 0)} are too much"
    if not is_close and (best.loss or 0.0) < (each.loss or 0.0):
        return f"its weights lose {math.expm1(each.loss or 0.0):.1%} of perplexity"
    if factory.remembers(each.drafter):
        return "it keeps answers on the disk, and is used where it is asked for"
    slower = f"{1 - each.tokens_per_s / (best.tokens_per_s or 1.0):.0%} slower"
    step_ms, best_ms = _step_ms(each), _step_ms(best)
    if each.target != best.target and step_ms > _SLOWER_STEP * best_ms:
        return f"{slower}: a step takes {step_ms:.3g} ms, not {best_ms:.3g}"
    if each.drafter == "none":
        return f"{slower}: nothing is drafted"
    if each.acceptance is None:
        return f"{slower}: it found nothing to draft here"
    if each.acceptance < _FEW_RIGHT:
        return f"{slower}: its draft tokens are right too seldom here ({each.acceptance:.0%})"
    row_share, guess_share = each.row_share or 0.0, each.guess_share or 0.0
    if guess_share > row_share:
        return f"{slower}: a draft token takes {guess_share:.2f} of a step"
    return f"{slower}: a row costs {row_share:.2f} of a step"


def _step_ms(placement: Placement) -> float:
    """Returns the time of a plain round."""
    return 1e3 * (placement.speedup or 1.0) / (placement.tokens_per_s or 1.0)
