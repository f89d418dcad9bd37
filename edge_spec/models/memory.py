"""Says before weights are read what a target and its drafts will take together, whether that fits
this machine, and what of them would."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceMemoryError
from edge_spec.models.asked_options import AskedOptions, declared_options
from edge_spec.models.devices import (
    CPU,
    PLANNED_TOKENS,
    Device,
    DeviceListing,
    Memory,
    Sizing,
    format_bytes,
    free_bytes,
    total_bytes,
)
from edge_spec.models.model_plan import PreparedModel
from edge_spec.models.options import LoadOptions

SWITCH = "EDGE_SPEC_MEMORY"  # an environment variable; "ignore" opens what does not fit
_OVERRIDE = f"{SWITCH}=ignore in the environment opens it all the same."
_LEAST_BITS = 4  # of a weight, as exporters write models that have to be converted
_TIGHT = 0.9  # of all memory, from which on a user is warned
_LEAST_TOKENS = 512  # of a context that is worth being offered
_STEP_TOKENS = 256
_log = logging.getLogger(__name__)


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
    """The memory of devices, labelled as their runtimes know them, such as "llamacpp cuda0": one
    that two runtimes use is counted for each by itself."""

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self._devices = {
            _label(each.runtime, each.name): each
            for each in devices
            if each.name and each.kind != CPU
        }

    def needs(self, models: Iterable[tuple[str, Memory]]) -> Needs:
        """Adds up what models that are open together need. models: each with its runtime."""
        main, found = 0, Counter[str]()
        for runtime, memory in models:
            for name, num_bytes in memory.on_devices.items():
                label = _label(runtime, name)
                device = self._devices.get(label)
                if device is not None and device.shares_memory:
                    main += num_bytes
                else:
                    found[label] += num_bytes
        return Needs(main, dict(found))

    def free(self) -> dict[str, int]:
        """Returns bytes by label, of the devices that tell."""
        return self._by_label(lambda device: device.free_bytes)

    def total(self) -> dict[str, int]:
        """Returns the same of all that they have."""
        return self._by_label(lambda device: device.total_bytes)

    def _by_label(self, read: Callable[[Device], int | None]) -> dict[str, int]:
        told = {label: read(each) for label, each in self._devices.items()}
        return {
            label: num_bytes
            for label, num_bytes in told.items()
            if num_bytes is not None and not self._devices[label].shares_memory
        }


def _label(runtime: str, name: str) -> str:
    """The first device of a kind may go without its number."""
    name = name.lower()
    return f"{runtime} {name}" if name[-1:].isdigit() else f"{runtime} {name}0"


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

    def device_shortage(self, in_all: bool) -> str | None:
        """Names the device that has too little memory of its own, as `FreeMemory.shortage` has it.
        in_all: counts what is in use there as well."""
        there = self.devices.total() if in_all else self.devices.free()
        found = FreeMemory(None, there).shortage(self.needs)
        return found and found.replace(" free on ", " on " if in_all else " free on ")

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

    def _share(self, i: int) -> int:
        memory = self.models[i].memory
        is_loaded = self.models[i].runtime in [model.runtime for model in self.models[:i]]
        return memory.total - (memory.library if is_loaded else 0)


def forecast(
    target: PreparedModel,
    drafts: Sequence[PreparedModel],
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


def require_fit(
    target: PreparedModel,
    drafts: Sequence[PreparedModel],
    options: LoadOptions,
    makes_room: bool = False,
) -> None:
    """Compares what the models need with all the memory of this machine or container, not only with
    what is free. A context that was not asked for counts with PLANNED_TOKENS: a cache grows with
    its text. Where that is nearly all, one line warns.

    What they need of a device's own memory is compared with what is free there, since nothing of it
    can be dropped or swapped. makes_room: other models of this process may be closed first; then
    with all that the device has.

    Raises DeviceMemoryError, which names the longest context that fits. Nothing is said where a
    runtime or the system does not tell.
    """
    if _is_ignored():
        return
    limit, num_tokens = total_bytes(), _counted_tokens(target, options)
    found = forecast(target, drafts, options, num_tokens)
    if found is None:
        return
    is_tight = limit is not None and found.needed > _TIGHT * limit
    if is_tight and not _is_counted(found, target, drafts, options):
        limit = None  # devices are looked for only where it matters: that takes half a second

    def shortage(of: Forecast) -> str | None:
        short = of.device_shortage(in_all=makes_room)
        if short is None and limit is not None and of.needed > limit:
            return f"{format_bytes(of.needed)}, and there are {format_bytes(limit)}"
        return short

    def fits_with(context: int) -> bool:
        changed = replace(options, context_length=context)
        other = forecast(target, drafts, changed, context)
        return other is not None and shortage(other) is None

    models = " and ".join(f"{each.name} on {each.runtime}" for each in found.models)
    said = f"{models} with {num_tokens} tokens of context needs"
    short = shortage(found)
    if short is None:
        if limit is not None and found.needed > _TIGHT * limit:
            _log.warning(
                "%s %s, nearly all of %s: the system may swap, or stop the program",
                *(said, format_bytes(found.needed), format_bytes(limit)),
            )
        return
    context = _longest(fits_with, num_tokens)
    helps = [] if context is None else [f"--context {context}"]
    if found.needs.on_devices:
        helps += ["another --device", "fewer --gpu-layers where the runtime has them"]
    known = declared_options(AskedOptions)["kv_type"].runtimes
    if target.runtime.name in known and options.kv_type is None:
        helps.append("--kv-type q8_0")
    helps += ["--draft none"] if drafts else []
    helps.append("a smaller quantization or model")
    remedy = f"What helps: {', '.join(helps)}. {_OVERRIDE}"
    raise DeviceMemoryError(f"{said} {short}", remedy=remedy)


def forecast_here(
    target: PreparedModel, drafts: Sequence[PreparedModel], options: LoadOptions
) -> Forecast | None:
    """Returns what models need, as `require_fit` counts it; None where that says nothing."""
    if total_bytes() is None or _is_ignored():
        return None
    found = forecast(target, drafts, options, _counted_tokens(target, options))
    return found if found is not None and _is_counted(found, target, drafts, options) else None


def fit_together(forecasts: Sequence[Forecast]) -> bool:
    """Says whether models that are open at the same time fit all the memory of this machine or
    container. True also where the system does not tell."""
    limit = total_bytes()
    together = Forecast(tuple(chain.from_iterable(each.models for each in forecasts)), None)
    return limit is None or together.needed <= limit


def fits_free_memory(found: Forecast) -> bool:
    """Says whether models fit what is free now, beside all that runs on this machine. True also
    where the system does not tell."""
    return replace(found, free=free_bytes()).fits


def _counted_tokens(target: PreparedModel, options: LoadOptions) -> int:
    return min(target.config.context_length, options.context_length or PLANNED_TOKENS)


def _is_counted(
    found: Forecast,
    target: PreparedModel,
    drafts: Sequence[PreparedModel],
    options: LoadOptions,
) -> bool:
    """Says whether all weights are in the memory of the processor, but for those that a runtime
    places on devices."""
    how = [options.runtime_options, *(options.draft_runtime_options for _ in drafts)]
    return all(
        bool(each.memory.on_devices) or _on_processor(model, options)
        for each, model, options in zip(found.models, (target, *drafts), how, strict=True)
    )


def _on_processor(model: PreparedModel, options: RuntimeOptions) -> bool:
    named = {name.lower() for name in options.providers}
    if named or options.gpu_layers == 0 or options.prefers_cpu:
        return named <= {CPU}
    if options.gpu_layers or options.rpc_servers or not isinstance(model.runtime, DeviceListing):
        return not (options.gpu_layers or options.rpc_servers)
    listed = model.runtime.devices(options)
    return all(device.kind == CPU for device in listed if device.fault is None)


def require_room_to_convert(model: Any) -> None:
    """Refuses before a conversion what its result could not run from, which has _LEAST_BITS a
    weight. model: as an exporter reads it; the shape of some is not known before.

    Raises DeviceMemoryError.
    """
    limit, config = total_bytes(), getattr(model, "config", None)
    if limit is None or not isinstance(config, ModelConfig) or _is_ignored():
        return
    needed = config.num_parameters * _LEAST_BITS // 8
    if needed > limit:
        raise DeviceMemoryError(
            f"the {config.num_parameters / 1e9:.1f} billion weights of {model.path} need "
            f"{format_bytes(needed)} with {_LEAST_BITS} bits each, and there are "
            f"{format_bytes(limit)}",
            remedy=f"Use a smaller model. {_OVERRIDE}",
        )


def _is_ignored() -> bool:
    return os.environ.get(SWITCH) == "ignore"


def _longest(fits: Callable[[int], bool], most: int) -> int | None:
    """Returns the longest context below `most` that fits, in steps of _STEP_TOKENS; None where not
    even _LEAST_TOKENS do."""
    low, high = _LEAST_TOKENS // _STEP_TOKENS, (most - 1) // _STEP_TOKENS
    if high < low or not fits(low * _STEP_TOKENS):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _STEP_TOKENS) else (low, middle - 1)
    return low * _STEP_TOKENS
