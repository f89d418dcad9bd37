"""The result of `edge-spec plan`: where a model or pair can run, best first, and how fast.
Durations are kept, so repeating a plan measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_spec.core.model import Progress
from edge_spec.errors import DeviceError, EdgeSpecError, UsageError, readable
from edge_spec.models.devices import Device, format_bytes
from edge_spec.models.memory import MAIN, Bytes, shortage
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Place
from edge_spec.placement.survey import MeasuredPlace, Surveyor
from edge_spec.scheduler.profile import Profile

USUAL_DRAFT_TOKENS = 4
_MOST_LOSS = 0.005  # nats a token above the least: half a percent of perplexity


@dataclass(frozen=True)
class Placement:
    """One way to run a model, alone or with a draft.

    step_s: of plain decoding, from durations of passes; None if the model does not fit.
    pair_step_s: of a step with USUAL_DRAFT_TOKENS, from each model's own durations; None if one
    does not fit by itself. memory_bytes: of all models with PLANNED_TOKENS of text, None if
    unknown. on_devices: in devices' own memory, by labels of `Forecast`.
    """

    target: Place
    draft: Place | None = None
    step_s: float | None = None
    pair_step_s: float | None = None
    memory_bytes: int | None = None
    on_devices: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""  # why it is not the first
    lossless: str = ""  # default guarantee for texts there, if known
    # KL divergence from the original weights, nats a token.
    loss: float | None = None

    @property
    def duration_s(self) -> float | None:
        """Return the step time that places are ranked by."""
        return self.step_s if self.draft is None else self.pair_step_s

    @property
    def plain_s(self) -> float:
        """Return the duration of plain decoding for a pair's step if all its draft tokens are
        right."""
        return (USUAL_DRAFT_TOKENS + 1) * (self.step_s or 0.0)

    @property
    def can_pay(self) -> bool:
        """Return whether such a step beats plain decoding."""
        return self.pair_step_s is not None and self.pair_step_s < self.plain_s

    def shortage(self, free: Bytes) -> str | None:
        """Describe what does not fit: "500 MB of 400 MB free", with the device if the memory is its
        own; None if all fits or is unknown."""
        return shortage({MAIN: self.memory_bytes or 0, **self.on_devices}, free)


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found. placements: of the model, best first, then of the pair at the model's
    best place. notes: on unusable places and uncertainties, a line each."""

    model: str
    draft: str | None  # as the user named it
    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = ()
    in_force: tuple[str, ...] = ()  # what a start uses now, who drafts and why


def make_plan(
    source: Source,
    draft: Source | None,
    devices: Sequence[Device],
    progress: Progress,
    refresh: bool = False,
) -> Plan:
    """Measure where a model, and maybe a draft, can run. refresh: also measure known passes. Raises
    an EdgeSpecError if nothing can run or fits, OSError."""
    surveyor = Surveyor(devices, progress, refresh)
    targets = surveyor.survey(source, LoadOptions())
    if not any(each.profile for each in targets):
        raise _nowhere(source, surveyor, bool(targets))
    placed = {each.candidate.place: each for each in targets}
    places = rank_places([_alone(surveyor, each) for each in targets], surveyor.free)
    pairs: tuple[Placement, ...] = ()
    if draft is not None:
        drafts = surveyor.survey(draft, LoadOptions(draft=(draft.model,)), "draft: ")
        if not any(each.profile for each in drafts):
            why = "does not fit" if drafts else "runs nowhere here"
            surveyor.note(f"draft: {draft.name} {why}")
        best = placed[places[0].target]
        pairs = rank_places([_paired(surveyor, best, each) for each in drafts], surveyor.free)
    return Plan(
        model=readable(source.model),
        draft=draft.model if draft else None,
        placements=(*places, *pairs),
        notes=tuple(surveyor.notes),
    )


def _nowhere(source: Source, surveyor: Surveyor, has_places: bool) -> EdgeSpecError:
    if has_places:
        free = format_bytes(surveyor.free.get(MAIN, 0))
        return UsageError(
            f"{source.name} fits nowhere: {free} are free",
            remedy="Free memory, or choose a smaller model or quantization.",
        )
    return DeviceError(
        f"{source.name} runs nowhere here: {'; '.join(surveyor.notes)}",
        remedy="See edge-spec devices, or choose a smaller model.",
    )


def _alone(surveyor: Surveyor, found: MeasuredPlace) -> Placement:
    candidate, profile, lossless = found.candidate, found.profile, found.lossless
    needs = surveyor.needs(candidate) or {}
    return Placement(
        candidate.place,
        step_s=profile.costs().at(lossless.plain_width if lossless else 1) if profile else None,
        memory_bytes=needs.pop(MAIN, None),
        on_devices=needs,
        lossless=lossless.describe() if profile and lossless else "",
        loss=candidate.prepared.loss,
    )


def _paired(surveyor: Surveyor, target: MeasuredPlace, draft: MeasuredPlace) -> Placement:
    needs = surveyor.needs(target.candidate, draft.candidate) or {}
    return replace(
        _alone(surveyor, target),
        draft=draft.candidate.place,
        pair_step_s=pair_step_s(target.profile, draft.profile),
        memory_bytes=needs.pop(MAIN, None),
        on_devices=needs,
    )


def pair_step_s(target: Profile | None, draft: Profile | None) -> float | None:
    """Return `Placement.pair_step_s` of two models."""
    if target is None or draft is None:
        return None
    return target.costs().at(USUAL_DRAFT_TOKENS + 1) + USUAL_DRAFT_TOKENS * draft.costs().at(1)


def rank_places(placements: Sequence[Placement], free: Bytes) -> tuple[Placement, ...]:
    """Sort the places of a model, or of its draft beside it, by their step, first those that fit
    and whose weights lose little; say why others are not first, and which drafts cannot pay."""
    least = min((each.loss for each in placements if each.loss is not None), default=0.0)

    def order(each: Placement) -> tuple[bool, bool, float]:
        loses = (each.loss or 0.0) - least > _MOST_LOSS
        return each.shortage(free) is not None, loses, each.duration_s or math.inf

    ranked = sorted(placements, key=order)

    def reason(each: Placement) -> str:
        best, is_pair = ranked[0], each.draft is not None
        if each is best and not is_pair:
            return ""
        if (lacking := each.shortage(free)) is not None:
            return f"does not fit: {lacking}"
        if each.duration_s is None or best.duration_s is None:
            too_much = f"{format_bytes(each.memory_bytes or 0)} are too much"
            return f"does not fit: {'one of the two is too large' if is_pair else too_much}"
        if is_pair and not each.can_pay:
            return (
                f"it cannot pay: {USUAL_DRAFT_TOKENS + 1} tokens take {_ms(each.duration_s)} ms "
                f"if all draft tokens are right, and {_ms(each.plain_s)} without a draft"
            )
        if (each.loss or 0.0) - least > _MOST_LOSS and (best.loss or 0.0) < (each.loss or 0.0):
            return f"its weights lose {math.expm1(each.loss or 0.0):.1%} of perplexity"
        if each is best:
            return ""
        slower = f"{1 - best.duration_s / each.duration_s:.0%} slower"
        what = f"a step with {USUAL_DRAFT_TOKENS} draft tokens" if is_pair else "a step"
        return f"{slower}: {what} takes {_ms(each.duration_s)} ms, not {_ms(best.duration_s)}"

    return tuple(replace(each, reason=reason(each)) for each in ranked)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
