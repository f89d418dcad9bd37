"""Makes a plan: every place is measured, texts are recorded once, and each way to draft is
replayed on them at the costs of each place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from edge_spec.control.lossless import LosslessMode, Losslessness
from edge_spec.core.model import Progress
from edge_spec.drafters import factory
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Candidate, candidates
from edge_spec.placement.chain import agreements, best_walk, walk
from edge_spec.placement.comparison import SLOWER_THAN_OWN
from edge_spec.placement.devices import Device
from edge_spec.placement.drafting import pass_costs, replay_drafters
from edge_spec.placement.forecast import forecast
from edge_spec.placement.memory import format_bytes, free_bytes
from edge_spec.placement.pinning import applied
from edge_spec.placement.plan import PLANNED_TOKENS, Placement, Plan
from edge_spec.placement.profile import TYPICAL_TOKENS, Profile
from edge_spec.placement.replay import Recording
from edge_spec.placement.survey import MeasuredPlace, survey
from edge_spec.placement.texts import record_texts
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts
from edge_spec.text.vocabulary import same_vocabulary

_FEW_RIGHT = 0.4  # of a drafter's draft tokens
_SLOWER_STEP = 1.03  # times the best one's
_MOST_LOSS = 0.005  # nats a token beyond the least: half a percent of perplexity


@dataclass
class Planner:
    """Plans for one model, and perhaps another that drafts for it.

    notes: a line for each place or drafter without a forecast, or with an uncertain one.
    is_certain: whether all forecasts are, so that the plan is worth keeping; known after `make`.
    refresh: measures again what the cache knows. converts: also what would have to be converted.
    """

    source: Source
    draft: Source | None
    devices: Sequence[Device]
    progress: Progress
    refresh: bool = False
    converts: bool = True

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.is_certain = True
        self._free = free_bytes()

    def make(self) -> Plan:
        """Raises an EdgeSpecError where nothing can run or nothing fits, OSError."""
        targets = self._survey(self.source, LoadOptions())
        opened = next((each for each in targets if each.profile is not None), None)
        if opened is None or opened.profile is None:
            raise UsageError(
                f"{self.source.name} fits nowhere: {format_bytes(self._free or 0)} are free",
                remedy="Free memory, or choose a smaller model or quantization.",
            )
        prompts = read_prompts(OWN_PROMPTS, per_category=1)
        recordings = record_texts(opened.candidate, prompts, opened.profile, self.progress)
        found = [each for target in targets for each in self._alone(target, recordings)]
        if self.draft is not None:
            found += self._paired(self.draft, recordings)
        return Plan(
            version=1,
            model=self.source.model,
            identity=self.source.identity,
            draft=self.draft.model if self.draft else None,
            draft_identity=self.draft.identity if self.draft else None,
            placements=ranked(found, self._free),
        )

    def _survey(self, source: Source, options: LoadOptions, role: str = "") -> list[MeasuredPlace]:
        places, refused = candidates(
            source,
            options,
            self.devices,
            self.progress,
            is_draft=bool(role),
            converts=self.converts,
        )
        self.notes += [f"{role}{line}" for line in refused if f"{role}{line}" not in self.notes]
        found = survey(places, self._free, self.progress, self.refresh)
        for each in found:
            if each.profile is not None and not each.profile.is_certain:
                self.is_certain = False
                self.notes.append(
                    f"{role}{each.candidate.place}: the machine was busy, the times are uncertain "
                    f"by {each.profile.spread:.0%}: plan again when it is free"
                )
            cost = each.profile and each.profile.own_loop_cost
            if cost and cost > SLOWER_THAN_OWN:
                place = each.candidate.place
                self.notes.append(
                    f"{role}{place}: a row takes {cost:.2f} of a plain step of {place.runtime}'s "
                    "own loop"
                )
        return found

    def _alone(self, target: MeasuredPlace, recordings: Sequence[Recording]) -> Iterator[Placement]:
        """No speculation, and every drafter that needs nothing but the text."""
        candidate, profile = target.candidate, target.profile
        plain = Placement(candidate.place, None, "none", loss=candidate.prepared.loss)
        plain = replace(plain, memory_bytes=self._memory(plain, candidate))
        if profile is None:
            yield plain
            return
        lossless = None if target.rows is None else target.rows.lossless(LosslessMode.AUTO)
        plain_rate = _plain_rate(profile, recordings, lossless)
        if lossless is not None:
            plain = replace(plain, lossless=lossless.told())
        yield replace(plain, tokens_per_s=plain_rate, speedup=1.0)
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
                speedup=tokens_per_s / plain_rate,
                acceptance=accepted / verified if verified else None,
                row_share=_row_share(profile),
            )
        self.progress(what, 1.0)

    def _paired(self, draft: Source, recordings: Sequence[Recording]) -> Iterator[Placement]:
        """Chains of the draft, with each model at each place.

        Both are measured again for it, since some runtimes give up a little speed to take turns.
        """
        options = LoadOptions(draft=(draft.model,))
        targets = self._survey(self.source, options)
        drafts = self._survey(draft, options, "draft: ")
        reader = next((each.candidate for each in drafts if each.profile is not None), None)
        if reader is None:
            self.notes.append(f"draft: {draft.name} does not fit")
            return
        vocabularies = (each.prepared.vocabulary() for each in (targets[0].candidate, reader))
        if not same_vocabulary(*vocabularies):
            self.notes.append(f"draft: {draft.name} has other tokens: there is no forecast")
            return
        what = "Reading the texts with the draft"
        self.progress(what, 0.0)
        model = reader.prepared.open(reader.options)
        try:
            hits = agreements(model, recordings)
        finally:
            model.close()
        self.progress(what, 1.0)
        for target, drafting in product(targets, drafts):
            yield self._with_draft(target, drafting, recordings, hits)

    def _with_draft(
        self,
        target: MeasuredPlace,
        draft: MeasuredPlace,
        recordings: Sequence[Recording],
        hits: Sequence[Sequence[bool]],
    ) -> Placement:
        loss = target.candidate.prepared.loss
        placement = Placement(
            target.candidate.place, draft.candidate.place, "draft-model", loss=loss
        )
        memory_bytes = self._memory(placement, target.candidate, draft.candidate)
        placement = replace(placement, memory_bytes=memory_bytes)
        if target.profile is None or draft.profile is None:
            return placement
        draft_s, step_s = (
            each.costs(TYPICAL_TOKENS).at(1) for each in (draft.profile, target.profile)
        )
        best = best_walk(recordings, hits, draft_s, pass_costs(target.profile))
        return replace(
            placement,
            tokens_per_s=best.tokens_per_s,
            speedup=best.tokens_per_s / _plain_rate(target.profile, recordings),
            acceptance=best.acceptance,
            row_share=_row_share(target.profile),
            guess_share=draft_s / step_s,
        )

    def _memory(
        self, placement: Placement, target: Candidate, draft: Candidate | None = None
    ) -> int | None:
        options = applied(LoadOptions(), placement, self.draft.model if self.draft else None)
        drafts = [] if draft is None else [draft.prepared]
        memory = forecast(target.prepared, drafts, options, PLANNED_TOKENS)
        return None if memory is None else memory.total


def _alone_or_together() -> Iterator[str]:
    """The drafters that need nothing but the text, and those of them that may share a tree."""
    found = factory.installed_traits()
    alone = {name: traits for name, traits in found.items() if traits.needs_text_alone}
    yield from alone
    for name, traits in alone.items():
        yield from (f"{other},{name}" for other in traits.planned_with if other in alone)


def ranked(placements: Sequence[Placement], free: int | None) -> tuple[Placement, ...]:
    """The fastest that fits and whose weights say what the model's say first, each other one with
    what it lost by. A drafter that keeps answers is never chosen: that has to be asked for."""
    least = min((each.loss for each in placements if each.loss is not None), default=0.0)

    def is_close(placement: Placement) -> bool:
        return placement.loss is None or placement.loss - least <= _MOST_LOSS

    def worth(placement: Placement) -> tuple[bool, bool, bool, float]:
        rate = placement.tokens_per_s or 0.0
        return (
            not factory.remembers(placement.drafter),
            placement.fits(free),
            is_close(placement),
            rate,
        )

    best, *others = sorted(placements, key=worth, reverse=True)
    told = (_reason(each, best, free, is_close(each)) for each in others)
    return best, *(replace(each, reason=why) for each, why in zip(others, told, strict=True))


def _reason(each: Placement, best: Placement, free: int | None, is_close: bool) -> str:
    if each.tokens_per_s is None or not each.fits(free):
        memory = format_bytes(each.memory_bytes or 0)
        return f"does not fit: {memory} of {format_bytes(free or 0)} free"
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


def _plain_rate(
    profile: Profile, recordings: Sequence[Recording], lossless: Losslessness | None = None
) -> float:
    nothing = [[False] * len(recording.tokens) for recording in recordings]
    pass_s = pass_costs(profile)
    width = lossless.plain_width if lossless else 1

    def padded_s(rows: int, context_tokens: int) -> float:
        return pass_s(max(rows, width), context_tokens)

    return walk(recordings, nothing, 0, 0.0, padded_s).tokens_per_s


def _row_share(profile: Profile) -> float:
    costs = profile.costs(TYPICAL_TOKENS)
    return max(0.0, costs.at(4) - costs.at(1)) / 3 / costs.at(1)
