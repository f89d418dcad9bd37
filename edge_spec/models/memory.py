"""Forecast, before weights are read, the memory of a target and its drafts, and whether they
fit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from edge_spec.core.config import ModelConfig
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

SWITCH = "EDGE_SPEC_MEMORY"  # environment variable; "ignore" opens models that do not fit
MAIN = ""  # label of main memory
_OVERRIDE = f"{SWITCH}=ignore in the environment opens it all the same."
_LEAST_BITS = 4  # of a weight, as exporters write
_LEAST_TOKENS = 512  # shortest context worth offering
_STEP_TOKENS = 256

# Bytes by label: MAIN, or a device with its own memory, such as "llamacpp cuda0", counted for each
# runtime that uses it.
Bytes = Mapping[str, int]


def shortage(needs: Bytes, there: Bytes, free: str = " free") -> str | None:
    """Describe what is too small: "500 MB of 400 MB free", or "6,000 MB of 4,000 MB free on
    llamacpp cuda0"; None if all fits or is unknown."""
    for label, needed in needs.items():
        if needed > there.get(label, needed):
            on = f" on {label}" if label else ""
            return f"{format_bytes(needed)} of {format_bytes(there[label])}{free}{on}"
    return None


def by_label(devices: Iterable[Device]) -> dict[str, Device]:
    """Return all devices except the CPU."""
    return {
        _label(each.runtime, each.name): each for each in devices if each.name and each.kind != CPU
    }


def _label(runtime: str, name: str) -> str:
    """Add the number that a kind's first device may lack."""
    name = name.lower()
    return f"{runtime} {name}" if name[-1:].isdigit() else f"{runtime} {name}0"


def room(main: int | None, devices: Mapping[str, Device], in_all: bool = False) -> dict[str, int]:
    """Return the known room in main memory and devices' own. in_all: devices' total, not what is
    free."""
    found = {} if main is None else {MAIN: main}
    for label, each in devices.items():
        num_bytes = each.total_bytes if in_all else each.free_bytes
        if num_bytes is not None and not each.shares_memory:
            found[label] = num_bytes
    return found


@dataclass(frozen=True)
class ModelMemory:
    """Memory of one model. role: "target" or "draft"."""

    role: str
    name: str
    runtime: str
    memory: Memory


@dataclass(frozen=True)
class Forecast:
    """Memory of models that are open together. free: main memory before that, None if unknown;
    devices: by label."""

    models: tuple[ModelMemory, ...]
    free: int | None = None
    devices: Mapping[str, Device] = field(default_factory=dict, compare=False)

    @property
    def needs(self) -> dict[str, int]:
        needs = Counter({MAIN: sum(self._shares())})
        for model in self.models:
            for name, num_bytes in model.memory.on_devices.items():
                label = _label(model.runtime, name)
                device = self.devices.get(label)
                is_main = device is not None and device.shares_memory
                needs[MAIN if is_main else label] += num_bytes
        return dict(needs)

    def _shares(self) -> list[int]:
        """Return the main memory that each model adds; a library's code counts once."""
        loaded, shares = set[str](), list[int]()
        for each in self.models:
            is_loaded = each.runtime in loaded
            shares.append(each.memory.total - (each.memory.library if is_loaded else 0))
            loaded.add(each.runtime)
        return shares

    @property
    def total(self) -> int:
        return self.needs[MAIN]

    @property
    def needed(self) -> int:
        """Return the part of `total` without which passes reread the disk."""
        return self.total - sum(model.memory.mapped_twice for model in self.models)

    @property
    def fits(self) -> bool:
        """Return whether all fits; True if unknown."""
        return shortage(self.needs, room(self.free, self.devices)) is None

    def __str__(self) -> str:
        parts = " + ".join(
            f"{model.role} {model.name} on {model.runtime} {format_bytes(share)}"
            for model, share in zip(self.models, self._shares(), strict=True)
        )
        (_, total), *on_devices = self.needs.items()
        known = room(self.free, self.devices)
        told = f" = {format_bytes(total)}" if len(self.models) > 1 else ""
        told += _of(known.get(MAIN))
        for label, needed in on_devices:
            told += f", {format_bytes(needed)}{_of(known.get(label))} on {label}"
        return f"{parts}{told}"


def _of(free: int | None) -> str:
    return "" if free is None else f" of {format_bytes(free)} free"


def forecast(
    target: PreparedModel,
    drafts: Sequence[PreparedModel],
    num_tokens: int | None = None,
) -> Forecast | None:
    """Forecast the models' memory, loading nothing; None if a runtime cannot. num_tokens: of text;
    None: the target's whole context, which drafts follow whatever their own."""
    if num_tokens is None:
        num_tokens = _counted_tokens(target, target.config.context_length)
    models, listed = list[ModelMemory](), list[Device]()
    for prepared in (target, *drafts):
        runtime, how = prepared.runtime, prepared.how
        if not isinstance(runtime, Sizing):
            return None
        memory = runtime.memory(prepared.source, how, num_tokens)
        role = "draft" if models else "target"
        models.append(ModelMemory(role, prepared.name, runtime.name, memory))
        if memory.on_devices and isinstance(runtime, DeviceListing):
            listed += runtime.devices(how)
    return Forecast(tuple(models), free_bytes(), by_label(listed))


def require_fit(
    target: PreparedModel,
    drafts: Sequence[PreparedModel],
    makes_room: bool = False,
) -> None:
    """Refuse models that do not fit. Raises DeviceMemoryError with the longest context that fits.

    Main memory counts in total (machine or container). A device's own counts as far as it is free,
    since nothing there can be dropped or swapped; with makes_room in total, since other models of
    this process may be closed first. A context that was not requested counts as PLANNED_TOKENS,
    since a cache grows with its text. What is unknown passes.
    """

    def forecast_with(context: int) -> Forecast | None:
        asked = [_with_context(each, context) for each in (target, *drafts)]
        return forecast(asked[0], asked[1:], context)

    def short(of: Forecast | None) -> str | None:
        if of is None:
            return None
        there = room(None, of.devices, makes_room)
        on_devices = shortage(of.needs, there, "" if makes_room else " free")
        limit = total_bytes() if _are_counted(of, (target, *drafts)) else None
        if on_devices is None and limit is not None and of.needed > limit:
            return f"{format_bytes(of.needed)}, and there are {format_bytes(limit)}"
        return on_devices

    num_tokens = _counted_tokens(target)
    found = None if _is_ignored() else forecast(target, drafts, num_tokens)
    is_short = short(found)
    if found is None or is_short is None:
        return
    models = " and ".join(f"{each.name} on {each.runtime}" for each in found.models)
    context = _longest(lambda context: short(forecast_with(context)) is None, num_tokens)
    helps = [] if context is None else [f"--context {context}"]
    if len(found.needs) > 1:
        helps += ["another --device", "fewer --gpu-layers where the runtime has them"]
    known = declared_options(AskedOptions)["kv_type"].runtimes
    if target.runtime.name in known and target.how.kv_type is None:
        helps.append("--kv-type q8_0")
    helps += ["--draft none"] if drafts else []
    helps.append("a smaller quantization or model")
    raise DeviceMemoryError(
        f"{models} with {num_tokens} tokens of context needs {is_short}",
        remedy=f"What helps: {', '.join(helps)}. {_OVERRIDE}",
    )


def forecast_here(target: PreparedModel, drafts: Sequence[PreparedModel]) -> Forecast | None:
    """Return the needs as `require_fit` counts them; None if it checks nothing."""
    if total_bytes() is None or _is_ignored():
        return None
    found = forecast(target, drafts, _counted_tokens(target))
    return found if found is not None and _are_counted(found, (target, *drafts)) else None


def fit_together(forecasts: Sequence[Forecast]) -> bool:
    """Return whether models open together fit the machine or container; True if unknown."""
    limit = total_bytes()
    together = Forecast(tuple(chain.from_iterable(each.models for each in forecasts)))
    return limit is None or together.needed <= limit


def fits_free_memory(found: Forecast) -> bool:
    """Return whether models fit what is free now; True if unknown."""
    return replace(found, free=free_bytes()).fits


def _counted_tokens(target: PreparedModel, unasked: int = PLANNED_TOKENS) -> int:
    return min(target.config.context_length, target.how.context_length or unasked)


def _with_context(model: PreparedModel, context: int) -> PreparedModel:
    return replace(model, how=replace(model.how, context_length=context))


def _are_counted(found: Forecast, models: Sequence[PreparedModel]) -> bool:
    """Return whether all weights not placed on devices are in main memory."""
    return all(
        each.memory.on_devices
        or not ({*map(str.lower, how.providers)} - {CPU} or how.gpu_layers or how.rpc_servers)
        for each, how in zip(found.models, (model.how for model in models), strict=True)
    )


def require_room_to_convert(model: Any) -> None:
    """Refuse a conversion whose result, at _LEAST_BITS a weight, could not run. model: as an
    exporter reads it; some have no known shape. Raises DeviceMemoryError."""
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
    """Return the longest fitting context below `most`, in steps of _STEP_TOKENS; None if below
    _LEAST_TOKENS."""
    low, high = _LEAST_TOKENS // _STEP_TOKENS, (most - 1) // _STEP_TOKENS
    if high < low or not fits(low * _STEP_TOKENS):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _STEP_TOKENS) else (low, middle - 1)
    return low * _STEP_TOKENS
