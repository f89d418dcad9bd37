"""Memory of devices' own: what models take of it together, under whatever names their runtimes
know a device, and what is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from edge_spec.core.model import RuntimeOptions
from edge_spec.fitting.devices import CPU, Device
from edge_spec.fitting.memory import Memory, format_bytes


@runtime_checkable
class ListsMemory(Protocol):
    """A runtime that knows how much memory its devices have without trying them."""

    def memory_devices(self, options: RuntimeOptions) -> Sequence[Device]:
        """Those with a name and with memory of their own, or of the processor's that they use."""


@dataclass(frozen=True)
class Needs:
    """Bytes. main: of the processor's memory; on_devices: of devices' own, by label."""

    main: int = 0
    on_devices: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that are free. main: of the processor's memory, None where not known; on_devices: by
    label, of those that are known."""

    main: int | None
    on_devices: Mapping[str, int] = field(default_factory=dict)

    def shortage(self, needs: Needs) -> str | None:
        """Says what has too little, and how much: "500 MB of 400 MB free", or "6,000 MB of 4,000 MB
        free on llamacpp cuda0". None where all fits, or where that is not known."""
        if self.main is not None and needs.main > self.main:
            return f"{format_bytes(needs.main)} of {format_bytes(self.main)} free"
        for label, needed in needs.on_devices.items():
            if needed > self.on_devices.get(label, needed):
                free = format_bytes(self.on_devices[label])
                return f"{format_bytes(needed)} of {free} free on {label}"
        return None


class DeviceMemories:
    """The memory of devices. One that several runtimes reach is counted once. Its label is what the
    first of them calls it, such as "llamacpp cuda0"."""

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self._devices = [each for each in devices if each.name and each.kind != CPU]

    def needs(self, models: Iterable[tuple[str, Memory]]) -> Needs:
        """Adds up what models that are open together need. models: each with its runtime."""
        main, found = 0, Counter[str]()
        for runtime, memory in models:
            for name, num_bytes in memory.on_devices.items():
                device = self._find(runtime, name)
                if device is not None and device.shares_memory:
                    main += num_bytes
                else:
                    found[f"{runtime} {name}" if device is None else self._label(device)] += (
                        num_bytes
                    )
        return Needs(main, dict(found))

    def free(self) -> dict[str, int]:
        """Returns bytes by label, of the devices that tell."""
        return self._by_label(lambda device: device.free_bytes)

    def total(self) -> dict[str, int]:
        """Returns the same of all that they have."""
        return self._by_label(lambda device: device.total_bytes)

    def _by_label(self, read: Callable[[Device], int | None]) -> dict[str, int]:
        found: dict[str, int] = {}
        for device in self._devices:
            num_bytes = read(device)
            if num_bytes is not None and not device.shares_memory:
                label = self._label(device)
                found[label] = min(found.get(label, num_bytes), num_bytes)
        return found

    def _find(self, runtime: str, name: str) -> Device | None:
        asked = Device(runtime, name, None, "")
        return next((each for each in self._devices if _is_same(each, asked)), None)

    def _label(self, device: Device) -> str:
        first = next(each for each in self._devices if _is_same(each, device))
        return f"{first.runtime} {first.name}"


def _is_same(one: Device, other: Device) -> bool:
    """Says whether two names mean one device: of another runtime, by its number, or by a
    description that tells what it is. Of two equal cards one may be taken for the other: less fits
    then than could."""
    if one.runtime == other.runtime:
        return _numbered(one) == _numbered(other)
    has_description = bool(one.description) and one.kind == other.kind
    return _numbered(one) == _numbered(other) or (
        has_description and one.description == other.description
    )


def _numbered(device: Device) -> str:
    """The first device of a kind may go without its number."""
    name = (device.name or "").lower()
    return name if name[-1:].isdigit() else f"{name}0"
