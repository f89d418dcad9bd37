"""Forecasts of a draft model's chains, with each of the two models at each of its places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from edge_spec.core.model import Progress
from edge_spec.exactness.sharing import LosslessMode
from edge_spec.models.device_names import share_chip
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import described
from edge_spec.placement.gains import Pair, with_draft
from edge_spec.placement.place_work import PAIR, PlaceError, attempt, measure_pair, preferred
from edge_spec.placement.plan import Placement
from edge_spec.placement.profile import PairFindings, load_pair, profile_key, save_pair
from edge_spec.placement.replay import Recording
from edge_spec.placement.survey import MeasuredPlace, Surveyor, processor_first
from edge_spec.storage.json_store import tell_unkept
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
        try:
            save_pair(target.key, draft.key, found)
        except OSError as error:
            tell_unkept(target.key.path, error)
        return found


def _taking_turns(target: MeasuredPlace) -> MeasuredPlace:
    """Returns it as it is opened beside a draft, under whose key both are known together."""
    alone = target.candidate
    options = replace(alone.options, takes_turns=True)
    key = profile_key(alone.source, alone.prepared, options)
    return replace(target, candidate=replace(alone, options=options, key=key))
