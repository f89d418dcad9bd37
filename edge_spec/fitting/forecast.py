"""Forecasts what a target and its drafts will take together, in one line for the user, and counts
memory of devices' own, under whatever names their runtimes know a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from edge_spec.core.model import RuntimeOptions
from edge_spec.fitting.devices import CPU, Device
from edge_spec.fitting.memory import Memory, Sizing, format_bytes, free_bytes
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel


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


@dataclass(frozen=True)
class ModelMemory:
    """One model of a forecast; role: "target" or "draft"."""

    role: str
    name: str
    runtime: str
    memory: Memory


@dataclass(frozen=True)
class Forecast:
    """Holds the memory of models that are open together; free: bytes before they are, None where
    not known; devices: whose own memory some of it is."""

    models: tuple[ModelMemory, ...]
    free: int | None
    devices: DeviceMemories = field(default_factory=DeviceMemories, compare=False)

    @property
    def needs(self) -> Needs:
        """The code of a library that runs several models is there once."""
        found = self.devices.needs([(each.runtime, each.memory) for each in self.models])
        return replace(found, main=found.main + sum(map(self._share, range(len(self.models)))))

    @property
    def total(self) -> int:
        """Bytes of the processor's memory."""
        return self.needs.main

    @property
    def device_shortage(self) -> str | None:
        """Names the device that has too little memory of its own free, as `FreeMemory.shortage` has
        it."""
        return FreeMemory(None, self.devices.free()).shortage(self.needs)

    @property
    def device_excess(self) -> str | None:
        """Names the device that has too little memory in all: "6,000 MB of 4,000 MB on llamacpp
        cuda0"."""
        found = FreeMemory(None, self.devices.total()).shortage(self.needs)
        return None if found is None else found.replace(" free on ", " on ")

    @property
    def needed(self) -> int:
        """Bytes of `total` without which passes would read from the disk again."""
        return self.total - sum(model.memory.mapped_twice for model in self.models)

    @property
    def fits(self) -> bool:
        """True also where it is not known what is free."""
        return FreeMemory(self.free, self.devices.free()).shortage(self.needs) is None

    def __str__(self) -> str:
        parts = " + ".join(
            f"{model.role} {model.name} on {model.runtime} {format_bytes(self._share(i))}"
            for i, model in enumerate(self.models)
        )
        total = f" = {format_bytes(self.total)}" if len(self.models) > 1 else ""
        free = "" if self.free is None else f" of {format_bytes(self.free)} free"
        known = self.devices.free()
        on_devices = "".join(
            f", {format_bytes(needed)}{_of(known.get(label))} on {label}"
            for label, needed in self.needs.on_devices.items()
        )
        return f"{parts}{total}{free}{on_devices}"

    @property
    def warning(self) -> str | None:
        """A line for the user where the models may not fit, in one line."""
        if self.fits:
            return None
        what = "the device may refuse it"
        if self.device_shortage is None:
            what = "the system may swap or stop the program"
        return f"{self}: {what}. Give a shorter --context, a smaller quantization or no --draft."

    def _share(self, i: int) -> int:
        memory = self.models[i].memory
        is_loaded = self.models[i].runtime in [model.runtime for model in self.models[:i]]
        return memory.total - (memory.library if is_loaded else 0)


def forecast(
    target: ResolvedModel,
    drafts: Sequence[ResolvedModel],
    options: LoadOptions,
    num_tokens: int | None = None,
    devices: DeviceMemories | None = None,
) -> Forecast | None:
    """Returns what models will take together; None where a runtime does not know. Nothing is
    loaded.

    devices: where their memory is known already; None asks the runtimes of models that need some.

    num_tokens: of text; None: as many as the target's context holds. A draft follows the text of
    the target however large its own context may be.
    """
    limit = target.config.context_length
    if num_tokens is None:
        num_tokens = min(limit, options.context_length or limit)
    models, listed = [], list[Device]()
    for i, prepared in enumerate((target, *drafts)):
        if not isinstance(prepared.runtime, Sizing):
            return None
        how = options.draft_runtime_options if i else options.runtime_options
        memory = prepared.runtime.memory(prepared.source, how, num_tokens)
        role = "draft" if i else "target"
        models.append(ModelMemory(role, prepared.name, prepared.runtime.name, memory))
        if devices is None and memory.on_devices and isinstance(prepared.runtime, ListsMemory):
            listed += prepared.runtime.memory_devices(how)
    return Forecast(tuple(models), free_bytes(), devices or DeviceMemories(listed))


def _of(free: int | None) -> str:
    return "" if free is None else f" of {format_bytes(free)} free"
