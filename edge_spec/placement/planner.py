"""Makes a plan: finds the place of a model where a plain step is fastest, and of its draft where a
step with draft tokens is, and has the drafters write short texts there.

What passes take is kept, so that the same plan made again only writes the texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from pydantic import Field

from edge_spec.core.isolated import IsolatedError
from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.errors import DeviceError, EdgeSpecError, UsageError, readable
from edge_spec.models.devices import Device, format_bytes
from edge_spec.models.memory import MAIN, Bytes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.plan import USUAL_DRAFT_TOKENS, Placement, Plan
from edge_spec.placement.survey import (
    MEASURE_S,
    MOST_TOKENS,
    MeasuredPlace,
    OnStep,
    Surveyor,
    short_prompts,
)
from edge_spec.scheduler.engine_plan import default_drafter
from edge_spec.scheduler.profile import (
    Profile,
    doubt_profile,
    was_busy,
)

TRIAL_S = 25.0  # of all answers, as forecast
_MOST_TRIALS = 3  # places, of which all but the last fail
_LEAST_PROMPTS, _LEAST_TOKENS = 3, 16  # of a trial, and of an answer
_MOST_LOSS = 0.005  # nats a token beyond the least: half a percent of perplexity
# Over the default, from which on another way is clearly faster: on texts of other kinds another
# drafter may be the best, while plain decoding is the same on all.
_CLEARLY, _NOISE = 1.1, 1.03


@dataclass(frozen=True)
class Tried:
    """How fast a drafter wrote. speedup: the median of its answers' rates over those of plain
    decoding beside them. acceptance: of verified draft tokens, None where there were none."""

    tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    speedup: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None


Wrote = dict[str, Tried | str]  # by drafter; or why this model cannot have it

Prompts = Sequence[Sequence[int]]
# Placements at one place, and of one draft at most, plain decoding first; prompts; tokens of each
# answer; what is told the share that is done. Raises IsolatedError.
Trial = Callable[[Sequence[Placement], Prompts, int, OnStep], Wrote]


def rank_places(placements: Sequence[Placement], free: Bytes) -> tuple[Placement, ...]:
    """Sort places by their plain step: the fastest that fits and whose weights lose little comes
    first, each other one has the reason why it does not."""
    least = min((each.loss for each in placements if each.loss is not None), default=0.0)

    def order(each: Placement) -> tuple[bool, bool, float]:
        loses = (each.loss or 0.0) - least > _MOST_LOSS
        return each.shortage(free) is not None, loses, each.step_s or math.inf

    best, *others = sorted(placements, key=order)

    def reason(each: Placement) -> str:
        if (shortage := each.shortage(free)) is not None:
            return f"does not fit: {shortage}"
        if each.step_s is None or best.step_s is None:
            return f"does not fit: {format_bytes(each.memory_bytes or 0)} are too much"
        if (each.loss or 0.0) - least > _MOST_LOSS and (best.loss or 0.0) < (each.loss or 0.0):
            return f"its weights lose {math.expm1(each.loss or 0.0):.1%} of perplexity"
        return _slower(each.step_s, best.step_s, "a step")

    return replace(best, reason=""), *(replace(each, reason=reason(each)) for each in others)


def rank_drafters(tried: Sequence[Placement], default: str) -> tuple[Placement, ...]:
    """Sort drafters at one place by what they wrote. The default comes first unless another one is
    clearly faster: a few short texts of one kind say little of others."""
    ranked = sorted(tried, key=lambda each: each.tokens_per_s or 0.0, reverse=True)
    usual = next((each for each in ranked if each.drafter == default), ranked[-1])

    def gain(each: Placement, over: Placement) -> float:
        return (each.tokens_per_s or 0.0) / (over.tokens_per_s or 1.0)

    def is_clear(each: Placement) -> bool:
        return gain(each, usual) >= (_NOISE if each.drafter == "none" else _CLEARLY)

    best = next(filter(is_clear, ranked), usual)
    found = [replace(best, reason="")]
    for each in ranked:
        if each is not best:
            slower = 1 - gain(each, best)
            reason = f"{slower:.0%} slower"
            if slower < 0:
                reason = f"{-slower:.0%} faster here, which is too little to leave the default"
            found.append(replace(each, reason=reason))
    return tuple(found)


def why_no_draft(placements: Sequence[Placement]) -> str | None:
    """Say what the draft wrote where the best placement leaves it out; None where it does not, or
    where the draft was not tried."""
    best = placements[0]
    paired = next((each for each in placements if each.draft and each.speedup), None)
    if best.draft is not None or paired is None:
        return None
    why = f"{paired.tokens_per_s:.1f} tokens/s with it, {best.tokens_per_s:.1f} without"
    return f"the draft does not pay here: {why}"


def _slower(seconds: float, best_s: float, what: str) -> str:
    slower = f"{1 - best_s / seconds:.0%} slower"
    return f"{slower}: {what} takes {_ms(seconds)} ms, not {_ms(best_s)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def rank_pairs(pairs: Sequence[Placement], free: Bytes) -> list[Placement]:
    """Sort pairs at one place of the target by their step with draft tokens, those that fit
    first."""

    def order(each: Placement) -> tuple[bool, float]:
        return each.shortage(free) is not None, each.pair_step_s or math.inf

    ranked = sorted(pairs, key=order)

    def reason(each: Placement) -> str:
        shortage, best_s = each.shortage(free), ranked[0].pair_step_s
        if shortage is not None or each.pair_step_s is None or best_s is None:
            return f"does not fit: {shortage or 'one of the two is too large'}"
        if not each.can_pay:
            return (
                f"it cannot pay: {USUAL_DRAFT_TOKENS + 1} tokens take {_ms(each.pair_step_s)} ms "
                f"if all draft tokens are right, and {_ms(each.plain_s)} without a draft"
            )
        if each is ranked[0]:
            return ""
        return _slower(each.pair_step_s, best_s, f"a step with {USUAL_DRAFT_TOKENS} draft tokens")

    return [replace(each, reason=reason(each)) for each in ranked]


def pair_step_s(target: Profile | None, draft: Profile | None) -> float | None:
    """Return the `Placement.pair_step_s` of two models."""
    if target is None or draft is None:
        return None
    return target.costs().at(USUAL_DRAFT_TOKENS + 1) + USUAL_DRAFT_TOKENS * draft.costs().at(1)


class Planner:
    """Plans for one model, and perhaps another that drafts for it.

    notes: a line for each place or drafter that cannot be used, and for what is uncertain.
    refresh: measure passes again where they are known.
    """

    def __init__(
        self,
        source: Source,
        draft: Source | None,
        devices: Sequence[Device],
        progress: Progress,
        trial: Trial,
        refresh: bool = False,
    ) -> None:
        self._source, self._draft, self._trial = source, draft, trial
        self._report, self._end_s, self._then_s = progress, 0.0, 0.0
        self._surveyor = Surveyor(devices, self._progress, refresh)
        self._free = self._surveyor.free
        self.notes = self._surveyor.notes

    def make(self) -> Plan:
        """Raises an EdgeSpecError where nothing can run or nothing fits, OSError."""
        draft_s = MEASURE_S if self._draft else 0.0
        self._expect(MEASURE_S, draft_s + TRIAL_S)
        targets = self._surveyor.survey(self._source, LoadOptions())
        if not any(each.profile for each in targets):
            raise self._nowhere(targets)
        places = rank_places([self._alone(each) for each in targets], self._free)
        self._expect(draft_s, TRIAL_S)
        drafts = [] if self._draft is None else self._survey_draft(self._draft)
        self._expect(TRIAL_S)
        return Plan(
            model=readable(self._source.model),
            draft=self._draft.model if self._draft else None,
            placements=self._try(places, targets, drafts),
            notes=tuple(self.notes),
        )

    def _expect(self, seconds: float, then_s: float = 0.0) -> None:
        """Tell from now on with every step how long the plan will take, at most about. then_s: of
        what comes after this."""
        self._end_s, self._then_s = time.monotonic() + seconds, then_s

    def _progress(self, what: str, fraction: float) -> None:
        left_s = max(0.0, self._end_s - time.monotonic()) + self._then_s
        self._report(f"{what} (the plan takes about {left_s:.0f} s more)", fraction)

    def _nowhere(self, targets: Sequence[MeasuredPlace]) -> EdgeSpecError:
        if targets:
            free = format_bytes(self._free.get(MAIN, 0))
            return UsageError(
                f"{self._source.name} fits nowhere: {free} are free",
                remedy="Free memory, or choose a smaller model or quantization.",
            )
        return DeviceError(
            f"{self._source.name} runs nowhere here: {'; '.join(self.notes)}",
            remedy="See edge-spec devices, or choose a smaller model.",
        )

    def _alone(self, target: MeasuredPlace) -> Placement:
        candidate, profile, lossless = target.candidate, target.profile, target.lossless
        plain = Placement(candidate.place, None, "none", loss=candidate.prepared.loss)
        plain = self._surveyor.with_memory(plain, candidate)
        if profile is None:
            return plain
        step_s = profile.costs().at(lossless.plain_width if lossless else 1)
        told = lossless.describe() if lossless else ""
        return replace(plain, step_s=step_s, tokens_per_s=1 / step_s, lossless=told)

    def _survey_draft(self, draft: Source) -> list[MeasuredPlace]:
        found = self._surveyor.survey(draft, LoadOptions(draft=(draft.model,)), "draft: ")
        if any(each.profile for each in found):
            return found
        why = "does not fit" if found else "runs nowhere here"
        self._surveyor.note(f"draft: {draft.name} {why}")
        return []

    def _pair(self, target: MeasuredPlace, draft: MeasuredPlace) -> Placement:
        drafter = ",".join(factory.auto_drafters(drafts=True, corpora=False))
        placement = replace(self._alone(target), draft=draft.candidate.place, drafter=drafter)
        step_s = pair_step_s(target.profile, draft.profile)
        placement = replace(placement, tokens_per_s=None, pair_step_s=step_s)
        return self._surveyor.with_memory(placement, target.candidate, draft.candidate)

    def _try(
        self,
        places: Sequence[Placement],
        targets: Sequence[MeasuredPlace],
        drafts: Sequence[MeasuredPlace],
    ) -> tuple[Placement, ...]:
        """Return what the drafters wrote at the best place that does not fail, and after it the
        other places and pairs, without those that do."""
        measured = {each.candidate.place: each for each in targets}
        others, tried = list(places), list[Placement]()
        for alone in [each for each in places if each.step_s and self._fits(each)][:_MOST_TRIALS]:
            target = measured[alone.target]
            pairs = rank_pairs([self._pair(target, each) for each in drafts], self._free)
            others += pairs
            paying = [each for each in pairs if each.can_pay and self._fits(each)]
            for pair in (*paying[:1], None):
                first = pair or alone
                try:
                    tried += self._write(alone, target, pair)
                    break
                except IsolatedError as error:
                    self._surveyor.note(f"{first}: {error}")
                    others = [each for each in others if not _runs_at(each, first)]
            if tried:
                break
        done = {(each.target, each.draft) for each in tried}
        left = [each for each in others if (each.target, each.draft) not in done]
        return (*tried, *left) or tuple(places)

    def _fits(self, placement: Placement) -> bool:
        return placement.shortage(self._free) is None

    def _write(
        self, alone: Placement, target: MeasuredPlace, pair: Placement | None
    ) -> tuple[Placement, ...]:
        """Return what each drafter wrote at one place. Raises IsolatedError."""
        assert target.profile is not None and alone.step_s is not None
        default = default_drafter(target.profile) or "none"
        ways = [replace(alone, drafter=name) for name in dict.fromkeys(_by_text(default))]
        if pair is not None:
            names = dict.fromkeys((pair.drafter, "draft-model"))
            ways += [replace(pair, drafter=name) for name in names]
        found = self._measured(ways, target)
        self._compare(target, _slowdown(alone, found))
        tried = []
        for each in ways:
            wrote = found[each.drafter]
            if isinstance(wrote, str):
                self._surveyor.note(f"{each.drafter}: {wrote}")
            else:
                tried.append(replace(each, **vars(wrote)))
        return rank_drafters(tried, default)

    def _compare(self, target: MeasuredPlace, slowdown: float) -> None:
        """Note where plain decoding and its passes did not take about as long: something else used
        the machine. Passes that took much longer are measured again by the next plan."""
        if not was_busy(max(slowdown, 1 / slowdown) - 1):
            return
        what = f"plain decoding took {slowdown:.1f} times as long as its passes before"
        if slowdown < 1:
            doubt_profile(target.candidate.key)
            what = f"passes took {1 / slowdown:.1f} times as long as plain decoding afterwards"
        what += ", the machine was busy: plan again when it is free"
        self._surveyor.note(f"{target.candidate.place}: {what}")

    def _measured(self, ways: Sequence[Placement], target: MeasuredPlace) -> Wrote:
        prepared, step_s = target.candidate.prepared, ways[0].step_s or 0.0
        num_tokens = TRIAL_S / (step_s * len(ways))
        prompts = short_prompts(prepared)
        prompts = prompts[: max(_LEAST_PROMPTS, int(num_tokens / MOST_TOKENS))]
        length = max(_LEAST_TOKENS, min(MOST_TOKENS, int(num_tokens / len(prompts))))
        on_step = partial(self._progress, f"Trying drafters on {target.candidate.place}")
        return self._trial(ways, prompts, length, on_step)


def _runs_at(placement: Placement, failed: Placement) -> bool:
    """Return whether it needs the place that failed, or the pair of places."""
    return placement.target == failed.target and failed.draft in (None, placement.draft)


def _slowdown(alone: Placement, found: Wrote) -> float:
    """Return the time of a token that plain decoding wrote over the one of its passes."""
    plain = found["none"]
    assert isinstance(plain, Tried) and alone.step_s is not None
    return 1 / (plain.tokens_per_s * alone.step_s)


def _by_text(default: str) -> Iterator[str]:
    """Yield no drafter, the default, and the others that need nothing but the text. Those that keep
    answers have none here."""
    yield from ("none", default)
    for name, traits in factory.installed_traits().items():
        if traits.needs_text_alone and not traits.remembers:
            yield name
