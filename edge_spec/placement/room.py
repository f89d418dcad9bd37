"""The memory that models have on this machine, and what placements need of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_spec.fitting.device_memory import DeviceMemories, FreeMemory
from edge_spec.fitting.devices import Device
from edge_spec.fitting.forecast import forecast
from edge_spec.fitting.memory import PLANNED_TOKENS, Sizing, free_bytes
from edge_spec.models.options import LoadOptions
from edge_spec.placement.candidates import Candidate
from edge_spec.placement.pinning import applied
from edge_spec.placement.plan import Placement


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
