"""Forecasts what a target and its drafts will take together, in one line for the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edge_spec.fitting.device_memory import DeviceMemories, FreeMemory, ListsMemory, Needs
from edge_spec.fitting.devices import Device
from edge_spec.fitting.memory import Memory, Sizing, format_bytes, free_bytes
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel


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
        return self._shortage is None

    @property
    def _shortage(self) -> str | None:
        return FreeMemory(self.free, self.devices.free()).shortage(self.needs)

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
