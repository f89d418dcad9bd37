"""Work with a model at one place, here or in a process of its own: what it takes and returns can be
written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from edge_spec.errors import SessionError
from edge_spec.exactness.batch_invariance import USUAL_WIDTHS
from edge_spec.exactness.lossless import LosslessMode
from edge_spec.fitting.memory import resident_bytes
from edge_spec.placement.candidates import Candidate, candidate_of
from edge_spec.placement.chain import agreements
from edge_spec.placement.comparison import own_loop_cost
from edge_spec.placement.measure import Effort, measure
from edge_spec.placement.pair_probe import probe_pair
from edge_spec.placement.profile import PairFindings, Profile, save_profile
from edge_spec.placement.replay import Recording, record
from edge_spec.placement.row_findings import rows_key, settle_rows
from edge_spec.storage.json_store import tell_unkept

OnStep = Callable[[float], None]
PlaceWork = Callable[[Candidate, Any, OnStep], Any]


@dataclass(frozen=True)
class Asked:
    """A prompt, and how many tokens of its answer are wanted."""

    category: str
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Written:
    """A `Recording` without arrays."""

    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: list[list[int]]
    gaps: list[list[float]]

    @classmethod
    def of(cls, found: Recording) -> Written:
        top, gaps = found.top.tolist(), found.gaps.tolist()
        return cls(found.category, found.prompt, found.tokens, top, gaps)

    @property
    def recording(self) -> Recording:
        top, gaps = np.array(self.top, np.int32), np.array(self.gaps, np.float32)
        return Recording(self.category, self.prompt, self.tokens, top, gaps)


ASKED = TypeAdapter(tuple[Asked, ...])
PAIR = TypeAdapter(PairFindings)
PROFILE = TypeAdapter(Profile)
WRITTEN = TypeAdapter(tuple[Written, ...])


def measure_place(place: Candidate, max_s: float, on_step: OnStep) -> Any:
    """A `PROFILE`, which is kept, as is what is found of rows. max_s: of its passes."""
    before = resident_bytes()
    with closing(place.prepared.open(place.options)) as model:
        key = rows_key(place.key, place.prepared.config)
        rows = settle_rows(model, key, USUAL_WIDTHS, LosslessMode.AUTO)
        profile = measure(model, Effort(max_s=max_s), on_step)
        own_loop = own_loop_cost(model)
        after = resident_bytes()
        trees = model.capabilities.trees
    # Memory that another model has left may be used again: then less than it takes is seen.
    grown = None if before is None or after is None else max(0, after - before)
    branches = trees and rows.batch_invariance.branch_invariant
    profile = replace(profile, resident_bytes=grown, branches=branches, own_loop_cost=own_loop)
    try:
        save_profile(place.key, profile)
    except OSError as error:
        tell_unkept(place.key.path, error)
    return PROFILE.dump_python(profile, mode="json")


def record_at(place: Candidate, asked: Any, on_step: OnStep) -> Any:
    """`WRITTEN`: the greedy answers to what is `ASKED`."""
    wanted = ASKED.validate_python(asked)
    stop_ids = place.prepared.text.eos_ids
    found = []
    with (
        closing(place.prepared.open(place.options)) as model,
        closing(model.open_session()) as session,
    ):
        for i, each in enumerate(wanted):
            on_step(i / len(wanted))
            answer = record(session, each.prompt, each.num_tokens, stop_ids, each.category)
            if not np.isfinite(answer.gaps).all():
                raise SessionError(
                    f"{place.place} computes wrong: its scores are no numbers",
                    remedy="Choose another device.",
                )
            found.append(Written.of(answer))
    return WRITTEN.dump_python(tuple(found), mode="json")


def read_at(place: Candidate, written: Any, on_step: OnStep) -> Sequence[Sequence[bool]]:
    """Says for each token of each text of `WRITTEN` whether the model prefers it."""
    texts = WRITTEN.validate_python(written)
    with closing(place.prepared.open(place.options)) as model:
        return agreements(model, [each.recording for each in texts])


def measure_pair(place: Candidate, draft: Any, on_step: OnStep) -> Any:
    """`PAIR`: the model beside a draft, a `described` candidate."""
    drafting = candidate_of(draft)
    with (
        closing(place.prepared.open(place.options)) as target_model,
        closing(drafting.prepared.open(drafting.options)) as draft_model,
    ):
        return PAIR.dump_python(probe_pair(target_model, draft_model, on_step), mode="json")


WORKS: dict[str, PlaceWork] = {
    work.__name__: work for work in (measure_place, record_at, read_at, measure_pair)
}
