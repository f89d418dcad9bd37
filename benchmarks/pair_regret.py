"""Compares what the plan of a pair chooses on a simulated machine with the best there is: every
draft at every place, with every number of draft tokens, with overlap and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from pair_replay import DraftedText, PairCosts, decode_pair, tokens_per_s
from roofline import RooflineModel, SimulatedMachine

from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import Stats
from edge_spec.fitting.forecast import FreeMemory
from edge_spec.placement.chain import MOST_DRAFT_TOKENS, Meanwhile, RoundCosts, walk
from edge_spec.placement.gains import Pair, can_overlap, plain_rate, with_draft
from edge_spec.placement.plan import Place, Placement
from edge_spec.placement.profile import PairFindings
from edge_spec.placement.ranking import ranked
from edge_spec.placement.replay import Recording

_SLOW_TARGET = 0.5  # of the best plain rate: a target there is not tried with drafts


class Way(NamedTuple):
    """A draft and where it runs, None for no draft."""

    target_unit: str
    draft: str | None = None
    draft_unit: str | None = None
    num_draft_tokens: int = 0
    overlaps: bool = False


class SimulatedDraft(NamedTuple):
    """texts: where it was right."""

    model: RooflineModel
    texts: Sequence[DraftedText]


class Judged(NamedTuple):
    """A way, and the tokens a second that it decodes with."""

    way: Way
    rate: float


@dataclass(frozen=True)
class PairCase:
    """A target on a machine, and the drafts that there are for it. draft_units: where these may
    run, None for anywhere."""

    machine: SimulatedMachine
    target: RooflineModel
    drafts: Mapping[str, SimulatedDraft]
    draft_units: Sequence[str] | None = None

    def planned(self) -> tuple[Way, Placement]:
        """Returns what a plan ranks first by measured costs, and its forecast."""
        found = list(self._forecasts())
        best = ranked([placement for placement, _ in found], FreeMemory(None, {}))[0]
        way = next(way for placement, way in found if _is_same(placement, best))
        tokens = best.draft_tokens or 0
        return way._replace(num_draft_tokens=tokens, overlaps=best.overlapped), best

    def best(self) -> Judged:
        """Returns the fastest of all ways. Those are decoded that could be, if what a round takes
        for taking turns, catching up and waiting for each other were nothing."""
        best = self.plain()
        bounded = [(self._most(way), way) for way in self._ways()]
        for most, way in sorted(bounded, reverse=True):
            if most > best.rate:
                best = max(best, self.decoded(way), key=lambda each: each.rate)
        return best

    def decoded(self, way: Way) -> Judged:
        """Decodes the texts with the way's number of draft tokens in every round."""
        stats = self._decode(way, way.num_draft_tokens, way.overlaps)
        return Judged(way, tokens_per_s(stats))

    def plain(self) -> Judged:
        """Returns the fastest place without a draft."""
        return max((self.decoded(Way(unit)) for unit in self.machine.units), key=lambda e: e.rate)

    def used(self, way: Way) -> tuple[float, list[Stats]]:
        """Decodes as a user would at this place: with the adaptive policy and the trial of overlap,
        which know the costs and nothing of the draft. Returns tokens a second and statistics."""
        tokens, begins, findings = None if way.draft else 0, True, self._findings(way)
        if findings is not None:
            costs = self._costs(way)
            target = RowCosts({rows: costs.target_s(rows) for rows in range(1, 17)})
            begins = can_overlap(findings, target, costs.draft_s(1))
        stats = self._decode(way, tokens, None, begins)
        return tokens_per_s(stats), stats

    def _decode(
        self, way: Way, tokens: int | None, overlaps: bool | None, begins: bool = True
    ) -> list[Stats]:
        drafted = next(iter(self.drafts.values())) if way.draft is None else self.drafts[way.draft]
        return decode_pair(drafted.texts, self._costs(way), tokens, overlaps, begins)

    def _most(self, way: Way) -> float:
        """Tokens a second that its rounds cannot exceed."""
        assert way.draft is not None
        costs, texts = self._costs(way), self.drafts[way.draft].texts
        alone_s = 0.0 if way.overlaps else costs.draft_s(1)
        bare = RoundCosts(lambda rows, context: costs.target_s(rows), alone_s)
        hits = [text.hits for text in texts]
        recordings = [_recording(text) for text in texts]
        return walk(recordings, hits, way.num_draft_tokens, bare).tokens_per_s

    def _costs(self, way: Way) -> PairCosts:
        unit = self.machine.units[way.target_unit]
        target, findings = self.target, self._findings(way)

        def target_s(rows: int) -> float:
            return unit.pass_s(target, rows) + rows * target.row_ms / 1e3

        def draft_s(rows: int) -> float:
            assert way.draft is not None and way.draft_unit is not None
            model = self.drafts[way.draft].model
            found = self.machine.units[way.draft_unit].pass_s(model, rows)
            return found + rows * model.row_ms / 1e3

        meanwhile = None
        if findings is not None:
            meanwhile = Meanwhile(findings.target_slowdown, findings.draft_slowdown)
        return PairCosts(target_s, draft_s, findings.switch_s if findings else 0.0, meanwhile)

    def _findings(self, way: Way) -> PairFindings | None:
        if way.draft is None or way.draft_unit is None:
            return None
        drafting = way.draft_unit, self.drafts[way.draft].model
        return self.machine.findings((way.target_unit, self.target), drafting)

    def _forecasts(self) -> Iterator[tuple[Placement, Way]]:
        for unit in self.machine.units:
            profile = self.machine.profile(unit, self.target)
            texts = next(iter(self.drafts.values())).texts
            rate = plain_rate(profile, [_recording(text) for text in texts])
            yield Placement(_place(unit), None, "none", rate, 1.0), Way(unit)
        for way in self._pairs():
            assert way.draft is not None and way.draft_unit is not None
            drafted = self.drafts[way.draft]
            pair = Pair(
                self.machine.profile(way.target_unit, self.target),
                self.machine.profile(way.draft_unit, drafted.model),
                self._findings(way),
                has_devices=way.draft_unit != way.target_unit,
            )
            place = replace(_place(way.draft_unit), weights=way.draft)
            bare = Placement(_place(way.target_unit), place, "draft-model")
            recordings = [_recording(text) for text in drafted.texts]
            yield with_draft(bare, pair, recordings, [text.hits for text in drafted.texts]), way

    def _pairs(self) -> Iterator[Way]:
        units = self.machine.units
        for unit in units:
            for name in self.drafts:
                for draft_unit in self.draft_units or units:
                    yield Way(unit, name, draft_unit)

    def _ways(self) -> Iterator[Way]:
        """All with a draft."""
        rates = {unit: self.decoded(Way(unit)).rate for unit in self.machine.units}
        least = _SLOW_TARGET * max(rates.values())
        for pair in self._pairs():
            if rates[pair.target_unit] < least:
                continue
            for overlaps in (False, True) if pair.draft_unit != pair.target_unit else (False,):
                for tokens in range(1, MOST_DRAFT_TOKENS + 1):
                    yield pair._replace(num_draft_tokens=tokens, overlaps=overlaps)


def _place(unit: str) -> Place:
    return Place("simulated", unit, None, "int4", "1")


def _is_same(one: Placement, other: Placement) -> bool:
    return (one.target, one.draft) == (other.target, other.draft)


def _recording(text: DraftedText) -> Recording:
    count = len(text.ranks)
    return Recording("", (1, 2), (0,) * count, np.zeros((count, 1)), np.zeros((count, 1)))
