"""Measures models at every place where they can run here, within the memory of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from edge_spec.core.model import Progress
from edge_spec.fitting.devices import PLANNED_TOKENS, Device, Sizing, free_bytes
from edge_spec.fitting.forecast import DeviceMemories, FreeMemory, forecast
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Candidate, candidates
from edge_spec.placement.comparison import SLOWER_THAN_OWN
from edge_spec.placement.pinning import applied
from edge_spec.placement.place_work import PROFILE, OnStep, PlaceError, attempt, measure_place
from edge_spec.placement.plan import Place, Placement
from edge_spec.placement.profile import Profile, ProfileKey, load_profile
from edge_spec.placement.row_findings import RowFindings, known_rows, rows_key

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
                known_rows(rows_key(place.key, place.prepared.config)),
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
        options = applied(LoadOptions(), placement, draft_model)
        drafts = [] if draft is None else [draft.prepared]
        found = forecast(target.prepared, drafts, options, PLANNED_TOKENS, self.devices)
        if found is None:
            return placement
        needs = found.needs
        return replace(placement, memory_bytes=needs.main, on_devices=needs.on_devices)
