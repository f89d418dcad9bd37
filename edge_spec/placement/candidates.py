"""Places where a model could run here: runtimes, their devices, numbers of threads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from edge_spec.core.model import Progress, RuntimeOptions
from edge_spec.errors import EdgeSpecError, UsageError, install
from edge_spec.models import runtimes
from edge_spec.models.devices import CPU, Device
from edge_spec.models.draft_choice import cheapest
from edge_spec.models.model_plan import (
    ModelPlan,
    PreparedModel,
    choose,
    prepare_model,
    ways_to_run,
)
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.machine import available_cores
from edge_spec.scheduler.profile import ProfileKey, profile_key

# Slower than any other runtime. Core AI computes on one core on Linux.
_FOR_CHECKS = ("reference", "coreai") if sys.platform == "linux" else ("reference",)
_CHEAP_BYTES = 150_000_000  # of a model's files, for a conversion of half a minute


@dataclass(frozen=True)
class Place:
    """A runtime, its device and settings for one model."""

    runtime: str
    device: str
    threads: int | None  # None: the runtime's choice
    weights: str  # form of the weights, such as "int4 block 32"

    def __str__(self) -> str:
        if self.threads is None:
            return f"{self.runtime} {self.device}"
        return f"{self.runtime} {self.device} {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Candidate:
    """A model at one place, ready to be opened."""

    source: Source
    device: Device
    prepared: PreparedModel
    key: ProfileKey

    @property
    def is_risky(self) -> bool:
        """Return whether a driver is involved, which may crash or hang. The processor's libraries
        already ran in a separate process when devices were listed."""
        return self.device.kind != CPU

    @property
    def place(self) -> Place:
        return Place(self.key.runtime, self.key.device, self.key.threads, self.key.weights)


def described(model: str, device: Device, options: RuntimeOptions) -> str:
    """Describe a place in JSON for another process."""
    return json.dumps((model, asdict(device), asdict(options)))


def candidate_of(place: str) -> Candidate:
    """Resolve a `described` place in another process. Raises as `prepare_model` does."""
    kind = TypeAdapter(tuple[str, Device, RuntimeOptions])
    model, device, options = kind.validate_json(place)
    source = Source(model, _quiet)
    prepared = prepare_model(source, device.runtime, _quiet, options)
    if options.may_hold_less:  # only drafts may
        prepared = cheapest(prepared, source, _quiet)
    return Candidate(source, device, prepared, profile_key(source, prepared))


def _quiet(what: str, fraction: float) -> None: ...


def _at(source: Source, options: LoadOptions, device: Device) -> ModelPlan:
    how = replace(options.runtime_options, providers=(device.name or "",))
    return ModelPlan(source, device.runtime, how)


def _is_there(source: Source, options: LoadOptions, device: Device) -> bool:
    if device.name is None or device.fault is not None:
        return False
    with suppress(EdgeSpecError):  # raised again when the model is prepared
        return _at(source, options, device).is_there
    return False


def candidates(
    source: Source,
    options: LoadOptions,
    devices: Sequence[Device],
    progress: Progress,
    *,
    is_draft: bool = False,
) -> tuple[list[Candidate], list[str]]:
    """List all places for this model, or a conversion that exists or is cheap, unconverted ones
    first; and a line for each place that cannot run it. Costly conversions happen only if nothing
    else runs the model. Raises as `prepare_model` does if there is no place, or UsageError."""
    found: list[Candidate] = []
    refused: list[str] = []
    fault: EdgeSpecError | None = None
    # By runtime, format and compute unit.
    prepared: dict[tuple[str, str, str | None], PreparedModel] = {}
    usual = runtimes.auto_runtime(source.formats)

    def order(device: Device) -> tuple[bool, bool]:
        return not _is_there(source, options, device), device.runtime != usual

    for device in sorted(devices, key=order):
        if device.runtime in _FOR_CHECKS:
            continue
        if device.name is None or device.fault is not None:
            name = f" {device.name}" if device.name else ""
            refused.append(f"{device.runtime}{name}: {device.fault}")
            continue
        try:
            plan = _at(source, options, device)
            key = (device.runtime, plan.format, plan.conversion.compute)
            if key not in prepared:
                if found and source.num_bytes > _CHEAP_BYTES and not plan.is_there:
                    refused.append(_too_dear(source, device.runtime))
                    continue
                model = plan.prepare(progress)
                prepared[key] = cheapest(model, source, progress) if is_draft else model
        except EdgeSpecError as error:
            refused.append(f"{device.runtime} {device.name}: {error.shown}")
            fault = fault or error
            continue
        model = prepared[key]
        base = options.draft_runtime_options if is_draft else options.runtime_options
        for threads in _thread_counts(device, is_draft):
            how = replace(base, providers=(device.name,), threads=threads)
            placed = replace(model, how=how)
            found.append(Candidate(source, device, placed, profile_key(source, placed)))
    if found:
        return found, refused
    if fault is not None:
        # Raises with all reasons if no runtime can run it.
        choose(ways_to_run(source))
        raise fault
    raise UsageError(
        f"nothing here can run {source.model}: {'; '.join(refused) or 'no runtime'}",
        remedy=f"{install('cpu')}.",
    )


def _too_dear(source: Source, runtime: str) -> str:
    return (
        f"{runtime}: {source.name} would have to be converted for it, which takes minutes: "
        f"edge-spec generate --runtime {runtime} does that"
    )


def _thread_counts(device: Device, is_draft: bool) -> list[int | None]:
    """Return the runtime's choice, and half of the cores: often faster for small models, above all
    drafts, and with two threads a core."""
    cores = available_cores()
    half = cores // 2
    if device.kind != CPU or half < (1 if is_draft else 2):
        return [None]
    return [None, half]
