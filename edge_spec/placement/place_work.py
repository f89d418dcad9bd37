"""Work with a model at one place, which may fail: on another device than the processor in a process
of its own, since a driver may crash, hang, or take the memory of all.

What a work takes and returns can be written as JSON. For the processor a process would take longer
than a small model's passes; what its libraries raise is a reason, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from edge_spec.core.isolated import IsolatedError, NoAnswerError, isolated, reason_of, tell
from edge_spec.core.model import Progress
from edge_spec.core.modes import LosslessMode
from edge_spec.errors import SessionError
from edge_spec.models.devices import PLANNED_TOKENS, Device, Sizing, free_bytes, resident_bytes
from edge_spec.models.memory import DeviceMemories, FreeMemory, forecast
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Candidate, candidate_of, candidates, described
from edge_spec.placement.gains import agreements
from edge_spec.placement.replay import Recording, record
from edge_spec.scheduler.batch_invariance import USUAL_WIDTHS
from edge_spec.scheduler.measure import SLOWER_THAN_OWN, Effort, measure, own_loop_cost, probe_pair
from edge_spec.scheduler.plan_file import Place, Placement, apply_placement
from edge_spec.scheduler.profile import (
    TYPICAL_TOKENS,
    PairFindings,
    Profile,
    ProfileKey,
    load_profile,
    save_profile,
)
from edge_spec.scheduler.row_findings import ROWS, RowFindings, rows_key, settle_rows
from edge_spec.text.prompt_files import Prompt

OnStep = Callable[[float], None]
PlaceWork = Callable[[Candidate, Any, OnStep], Any]

_TIMEOUT_S = 300.0  # more than a driver takes to compile its kernels, and we to measure
_MOST_TOKENS, _LEAST_TOKENS = 64, 16  # of each recorded answer
_LEAST_TEXTS = 2
_WHAT = "Recording texts"
READ_S, WRITE_S = 6.0, 6.0  # for all prompts, and for all answers
_BUSY = 2  # times as long, after which a machine is too busy for the rest of them


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
    save_profile(place.key, profile)
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
        begun_s = time.monotonic()
        for i, each in enumerate(wanted):
            on_step(i / len(wanted))
            if i >= _LEAST_TEXTS and time.monotonic() - begun_s > _BUSY * (READ_S + WRITE_S):
                break
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


class PlaceError(Exception):
    """A place did not do its work; `str()` is the reason, one line. is_silent: it never
    answered, and is not worth waiting for again."""

    def __init__(self, reason: str, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


def attempt(
    work: PlaceWork,
    place: Candidate,
    argument: Any,
    on_step: OnStep,
    others: Sequence[Candidate] = (),
) -> Any:
    """Returns what `work`, one of WORKS, makes of `argument`. others: places that it uses, too.
    Raises PlaceError."""
    if not any(each.is_risky for each in (place, *others)):
        try:
            return work(place, argument, on_step)
        except Exception as error:  # as in the other process
            raise PlaceError(reason_of(error)) from error
    where = described(place.source.model, place.device, place.options)
    request = {"work": work.__name__, "place": where, "argument": argument}
    done = 0.0

    def on_done(fraction: float) -> None:
        nonlocal done
        done = fraction
        on_step(fraction)

    with TemporaryDirectory() as directory:
        file = Path(directory) / "request"  # longer than a command line may be
        file.write_text(json.dumps(request), encoding="utf-8")
        try:
            return isolated(do_request, str(file), timeout_s=_TIMEOUT_S, on_step=on_done)
        except NoAnswerError as error:
            slow = f"it is too slow: {done:.0%} was done within {_TIMEOUT_S:g} s"
            raise PlaceError(slow if done else str(error), is_silent=True) from error
        except IsolatedError as error:
            raise PlaceError(str(error)) from error


def do_request(file: str) -> Any:
    """Does the work in the other process. Raises an EdgeSpecError, OSError, and whatever a library
    raises."""
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    place = candidate_of(request["place"])
    return WORKS[request["work"]](place, request["argument"], tell)


def record_texts(
    place: Candidate, prompts: Sequence[Prompt], profile: Profile, progress: Progress
) -> list[Recording]:
    """Greedy answers. The slower the model, the shorter they are, and the fewer of the longest
    prompts are among them; what does not fit the context is cut. Raises PlaceError."""
    chosen = _affordable(place, prompts, profile.prefill_tokens_per_s)
    step_s = profile.costs(TYPICAL_TOKENS).at(1)
    num_tokens = int(WRITE_S / (step_s * len(chosen)))
    num_tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, num_tokens))
    limit = place.prepared.config.context_length
    asked = tuple(
        Asked(category, tuple(prompt), min(num_tokens, limit - len(prompt)))
        for category, tokens in chosen
        for prompt in [tokens[: max(1, limit - num_tokens)]]
    )
    request = ASKED.dump_python(asked, mode="json")
    found = attempt(record_at, place, request, partial(progress, _WHAT))
    progress(_WHAT, 1.0)
    return [each.recording for each in WRITTEN.validate_python(found)]


def preferred(
    place: Candidate, recordings: Sequence[Recording], on_step: OnStep
) -> list[list[bool]]:
    """Says for each token of each text whether the model at this place prefers it after the ones
    before. Raises PlaceError."""
    written = WRITTEN.dump_python(tuple(map(Written.of, recordings)), mode="json")
    found: list[list[bool]] = attempt(read_at, place, written, on_step)
    return found


def _affordable(
    place: Candidate, prompts: Sequence[Prompt], tokens_per_s: float
) -> list[tuple[str, list[int]]]:
    """Categories and tokens, the shortest prompts first."""
    encode = place.prepared.text.prompt_of
    found = sorted(((each.category, encode(each.text)) for each in prompts), key=_length)
    total = accumulate(map(_length, found))
    return [
        each
        for i, (each, so_far) in enumerate(zip(found, total, strict=True))
        if i < _LEAST_TEXTS or so_far <= READ_S * tokens_per_s
    ]


def _length(prompt: tuple[str, list[int]]) -> int:
    return len(prompt[1])


MEASURE_S = 15.0  # for all places of a model together that the cache does not know
_MOST_S, _LEAST_S = 8.0, 3.0  # for one of them

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class MeasuredPlace:
    """A place with its profile; None where the model does not fit there, or where it fails for the
    reason `fault`, one line."""

    candidate: Candidate
    profile: Profile | None
    rows: RowFindings | None = None  # None where they are not known
    fault: str | None = None


def processor_first(places: Iterable[MeasuredPlace]) -> Iterator[MeasuredPlace]:
    """Gives those that were measured, where nothing can crash first."""
    measured = [each for each in places if each.profile is not None]
    yield from sorted(measured, key=lambda each: each.candidate.is_risky)


@dataclass
class Faults:
    """Collects what failed while a plan is made, so that nobody waits for it twice."""

    _places: dict[tuple[str, Place], str] = field(default_factory=dict)  # by model
    _silent: dict[tuple[str, str], str] = field(default_factory=dict)  # by runtime and device

    def of(self, place: Candidate) -> str | None:
        """Why it is not worth trying; None where it is."""
        device = place.key.runtime, place.key.device
        return self._places.get((place.source.model, place.place)) or self._silent.get(device)

    def add(self, place: Candidate, error: PlaceError) -> None:
        self._places[place.source.model, place.place] = str(error)
        if error.is_silent:
            self._silent[place.key.runtime, place.key.device] = str(error)


class Surveyor:
    """Measures for one plan.

    notes: a line for each place that cannot be used, of which are the reasons, or whose profile is
    uncertain. places: all that were looked at. is_certain: whether no profile is uncertain.
    refresh: as in `Planner`.
    """

    def __init__(self, devices: Sequence[Device], progress: Progress, refresh: bool) -> None:
        self.notes: list[str] = []
        self.reasons: list[str] = []
        self.places: list[Place] = []
        self.is_certain = True
        self.faults = Faults()
        self.room = Room.now(devices)
        self._devices = devices
        self._progress = progress
        self._refresh = refresh

    def survey(self, source: Source, options: LoadOptions, role: str = "") -> list[MeasuredPlace]:
        """One model is open at a time, and none that does not fit. role: "draft: " for one.

        A profile is saved as soon as it is complete, so that after an interrupt the rest is left to
        do. Raises an EdgeSpecError where there is no place at all, OSError.
        """
        places, refused = candidates(
            source, options, self._devices, self._progress, is_draft=bool(role)
        )
        self.places += [each.place for each in places]
        for line in refused:
            self._refuse(f"{role}{line}")
        tried = [each for each in places if self.room.fits(each) and not self.faults.of(each)]
        known: dict[ProfileKey, Profile | None] = {}
        if not self._refresh:
            known = {each.key: load_profile(each.key, each.prepared.profiles) for each in tried}
        new = {each.key: each for each in tried if known.get(each.key) is None}
        max_s = min(_MOST_S, max(_LEAST_S, MEASURE_S / max(1, len(new))))
        for key, place in new.items():
            if self.faults.of(place) is None:
                what = f"Measuring {place.prepared.name} on {place.place}"
                measured = partial(attempt, measure_place, place, max_s)
                found = self.tried(what, place, measured, role)
                known[key] = None if found is None else PROFILE.validate_python(found)
        for each in tried:
            self._note_profile(each.place, known.get(each.key), role)
        return [
            MeasuredPlace(
                place,
                known.get(place.key),
                ROWS.known(rows_key(place.key, place.prepared.config)),
                self.faults.of(place),
            )
            for place in places
        ]

    def fail(self, place: Candidate, error: PlaceError, role: str = "") -> None:
        """This place is of no use to the plan."""
        self.faults.add(place, error)
        self._refuse(f"{role}{place.place}: {error}")

    def tried(
        self, what: str, place: Candidate, work: Callable[[OnStep], _Found], role: str = ""
    ) -> _Found | None:
        """Returns what `work` finds at a place; None where it fails, which is noted. what: it does,
        for who watches."""
        self._progress(what, 0.0)
        try:
            found = work(partial(self._progress, what))
        except PlaceError as error:
            self.fail(place, error, role)
            return None
        self._progress(what, 1.0)
        return found

    def _note_profile(self, place: Place, profile: Profile | None, role: str) -> None:
        if profile is None:
            return
        if not profile.is_certain:
            self.is_certain = False
            self._note(
                f"{role}{place}: the machine was busy, the times are uncertain "
                f"by {profile.spread:.0%}: plan again when it is free"
            )
        cost = profile.own_loop_cost
        if cost and cost > SLOWER_THAN_OWN:
            self._note(
                f"{role}{place}: a row takes {cost:.2f} of a plain step of {place.runtime}'s "
                "own loop"
            )

    def _refuse(self, line: str) -> None:
        self.reasons.append(line)
        self._note(line)

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


@dataclass(frozen=True)
class Room:
    """The memory that is free before any model is open."""

    devices: DeviceMemories
    free: FreeMemory

    @classmethod
    def now(cls, devices: Sequence[Device]) -> Room:
        memories = DeviceMemories(devices)
        return cls(memories, FreeMemory(free_bytes(), memories.free()))

    def fits(self, place: Candidate) -> bool:
        """Says whether it fits; True also where that is not known."""
        runtime = place.prepared.runtime
        if not isinstance(runtime, Sizing):
            return True
        memory = runtime.memory(place.prepared.source, place.options, PLANNED_TOKENS)
        needs = self.devices.needs([(runtime.name, memory)])
        return self.free.shortage(replace(needs, main=needs.main + memory.total)) is None

    def with_memory(
        self,
        placement: Placement,
        target: Candidate,
        draft: Candidate | None = None,
        draft_model: str | None = None,
    ) -> Placement:
        """Completes it with what its models need together, where their runtimes can tell."""
        options = apply_placement(LoadOptions(), placement, draft_model)
        drafts = [] if draft is None else [draft.prepared]
        found = forecast(target.prepared, drafts, options, PLANNED_TOKENS, self.devices)
        if found is None:
            return placement
        needs = found.needs
        return replace(placement, memory_bytes=needs.main, on_devices=needs.on_devices)
