"""Measures a model at every place where it can run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_spec.control.batch_invariance import USUAL_WIDTHS
from edge_spec.control.lossless import LosslessMode
from edge_spec.core.model import Progress
from edge_spec.placement.candidates import Candidate
from edge_spec.placement.comparison import own_loop_cost
from edge_spec.placement.measure import Effort, measure
from edge_spec.placement.memory import Sizing, resident_bytes
from edge_spec.placement.plan import PLANNED_TOKENS
from edge_spec.placement.profile import Profile, load_profile, save_profile
from edge_spec.placement.row_findings import (
    RowFindings,
    RowsKey,
    known_rows,
    rows_key,
    settle_rows,
)
from edge_spec.storage.json_store import tell_unkept

_MEASURE_S = 30.0  # for all places together that the cache does not know
_MOST_S, _LEAST_S = 15.0, 3.0  # for one of them


@dataclass(frozen=True)
class MeasuredPlace:
    """A place with its profile; None where the model does not fit there."""

    candidate: Candidate
    profile: Profile | None
    rows: RowFindings | None = None  # None where they are not known


def survey(
    places: Sequence[Candidate], free: int | None, progress: Progress, refresh: bool = False
) -> list[MeasuredPlace]:
    """One model is open at a time, and none that does not fit into `free` bytes.

    A profile is saved as soon as it is complete, so that after an interrupt the rest is left to
    do. refresh: measures again what the cache knows. Raises an EdgeSpecError, OSError.
    """
    fitting = [place for place in places if fits(place, free)]
    known = {}
    if not refresh:
        known = {each.key: load_profile(each.key, each.prepared.profiles) for each in fitting}
    new = {place.key: place for place in fitting if known.get(place.key) is None}
    effort = Effort(max_s=min(_MOST_S, max(_LEAST_S, _MEASURE_S / max(1, len(new)))))
    for key, place in new.items():
        known[key] = _measure(place, effort, progress)
    return [
        MeasuredPlace(place, known.get(place.key), known_rows(_rows_key(place))) for place in places
    ]


def _rows_key(place: Candidate) -> RowsKey:
    return rows_key(place.key, place.prepared.config)


def fits(place: Candidate, free: int | None) -> bool:
    """True also where it is not known."""
    runtime = place.prepared.runtime
    if free is None or not isinstance(runtime, Sizing):
        return True
    memory = runtime.memory(place.prepared.source, place.options, PLANNED_TOKENS)
    return memory.total <= free


def _measure(place: Candidate, effort: Effort, progress: Progress) -> Profile:
    what = f"Measuring {place.prepared.name} on {place.place}"
    progress(what, 0.0)
    before = resident_bytes()
    model = place.prepared.open(place.options)
    try:
        rows = settle_rows(model, _rows_key(place), USUAL_WIDTHS, LosslessMode.AUTO)
        profile = measure(model, effort, lambda fraction: progress(what, fraction))
        own_loop = own_loop_cost(model)
        after = resident_bytes()
    finally:
        model.close()
    progress(what, 1.0)
    # Memory that another model has left behind may be used again: then less than it takes is seen.
    grown = None if before is None or after is None else max(0, after - before)
    branches = model.capabilities.trees and rows.batch_invariance.branch_invariant
    profile = replace(profile, resident_bytes=grown, branches=branches, own_loop_cost=own_loop)
    try:
        save_profile(place.key, profile)
    except OSError as error:
        tell_unkept(place.key.path, error)
    return profile
