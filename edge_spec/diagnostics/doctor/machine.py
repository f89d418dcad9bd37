"""Describes what there is to run on: versions, memory, disk, devices, the runtimes that can run a
model, and whether what the models will take is free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_spec.diagnostics.doctor.chosen import Chosen
from edge_spec.diagnostics.doctor.finding import Finding, fault, note, ok, warning
from edge_spec.fitting.devices import Device
from edge_spec.fitting.fit import what_fits
from edge_spec.fitting.forecast import forecast
from edge_spec.fitting.memory import PLANNED_TOKENS, format_bytes, free_bytes, total_bytes
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.runtime_choice import where_it_runs
from edge_spec.models.source import Source

CACHE_REMEDY = "Set EDGE_SPEC_CACHE to a directory that can be written."
_LEAST_DISK_BYTES = 1_000_000_000  # less leaves no room for the conversion of a small model

_SMALLER = "a smaller quantization or no --draft"


def check_machine(machine: Mapping[str, Any]) -> Iterator[Finding]:
    """machine: as `describe_machine` has it."""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    system, _, python = str(machine["system"]).partition(", ")
    yield ok("versions", f"{python}, {versions}")
    yield ok("processor", f"{machine['cpu']}, {machine['cores']} cores, {system}")
    free, total = free_bytes(), total_bytes()
    if free is None or total is None:
        yield note("memory", "the system does not say how much is free")
    else:
        yield ok("memory", f"{format_bytes(free)} free of {format_bytes(total)}")


def check_disk(cache: Path) -> Iterator[Finding]:
    """Looks at the disk where the cache is, or will be."""
    free = shutil.disk_usage(_nearest(cache)).free
    found = f"{format_bytes(free)} free for {cache}"
    refused = refusal(cache)
    if refused is not None:
        yield warning("disk", f"{refused}: what is learnt is not kept", CACHE_REMEDY)
    elif free < _LEAST_DISK_BYTES:
        yield warning("disk", found, "Free some, or set EDGE_SPEC_CACHE to another disk.")
    else:
        yield ok("disk", found)


def refusal(cache: Path) -> str | None:
    """Why nothing can be written in the cache, None where something can."""
    there = _nearest(cache)
    if not there.is_dir():
        return f"{there} is no directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def _nearest(cache: Path) -> Path:
    return next(path for path in (cache, *cache.absolute().parents) if path.exists())


def check_devices(devices: Sequence[Device]) -> Iterator[Finding]:
    usable: dict[str, list[str]] = {}
    for device in devices:
        if device.name is not None and device.fault is None:
            usable.setdefault(device.runtime, []).append(device.name)
    if usable:
        named = (f"{runtime} ({', '.join(names)})" for runtime, names in usable.items())
        yield ok("runtimes", ", ".join(named))
    else:
        yield fault("runtimes", "none can be used", 'Run: pip install "edge-spec[cpu]".')
    kernels = [f"{each.runtime} {each.name}: {each.kernels}" for each in devices if each.kernels]
    if kernels:
        yield note("kernels", "; ".join(kernels))
    for device in devices:
        if device.hint is not None:
            yield note("runtimes", device.hint, "Build it for this processor: docs/gguf.md.")
        if device.fault is None:
            continue
        if device.name is None:
            reason = device.fault.partition(". ")[0]  # after it comes what to do instead
            yield note("runtimes", f"not {device.runtime}: {reason}")
        else:
            yield warning(
                "devices",
                f"{device.runtime} {device.name}: {device.fault}",
                "Update its driver, or leave it out of --device.",
            )


def check_runtimes(source: Source) -> Iterator[Finding]:
    """Says nothing of bundles, which are of one format, and of the demo model, which is in all.
    Raises ModelFileError."""
    if source.is_demo or source.formats is not None or is_bundle(source.path):
        return
    can, refusals = where_it_runs(source, runtimes.known_runtimes(), LoadOptions())
    if can:
        yield ok("runtimes", f"runs on {', '.join(can)}")
    for refusal in refusals:
        yield note("runtimes", f"not on {refusal.runtime}: {refusal.error.shown}")


def check_memory(chosen: Chosen, numbers: dict[str, object]) -> Iterator[Finding]:
    """Checks the memory with a full context; where that does not fit, with PLANNED_TOKENS of
    text."""
    if not chosen.is_converted:
        missing = " and ".join(each.role for each in chosen.openings if each.prepared is None)
        yield note(
            "forecast",
            f"not known: the {missing} is converted for {chosen.openings[0].runtime} first",
            f"Start it once, or run {chosen.plan_command}.",
        )
        return
    target, *drafts = chosen.prepared
    tokens = chosen.context_length
    full = forecast(target, drafts, chosen.options, tokens)
    if full is None:
        yield note("forecast", f"{target.runtime.name} does not tell what its models take")
        return
    numbers["memory"] = {
        "context_tokens": tokens,
        "models": [asdict(each) for each in full.models],
        "total_bytes": full.total,
        "free_bytes": full.free,
        "fits": full.fits,
    }
    for each in full.models:
        sizes = (each.memory.weights, each.memory.cache, each.memory.work + each.memory.library)
        weights, cache, rest = map(format_bytes, sizes)
        yield ok(each.role, f"{each.runtime}: {weights} weights, {cache} cache, {rest} beside")
    free = "what is free is not known" if full.free is None else f"{format_bytes(full.free)} free"
    together = f"{format_bytes(full.total)} with {tokens} tokens of text, {free}"
    if full.device_shortage is not None:
        together = f"{together}, {full.device_shortage}"
    few = min(tokens, PLANNED_TOKENS)
    short = forecast(target, drafts, chosen.options, few)
    if full.fits:
        yield ok("together", together)
    elif short is not None and short.fits:
        yield warning(
            "together",
            f"{together}: it fits with {few} tokens, {format_bytes(short.total)}",
            f"Give --context {few}, {_SMALLER}.",
        )
    else:
        remedy = what_fits(target, drafts, chosen.options, few, lambda found: found.fits)
        yield fault("together", f"{together}: it does not fit", f"Free memory. {remedy}")
