"""What `edge-spec doctor` finds of this machine, and of what edge-spec keeps on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_spec.diagnostics.doctor.report import Finding, fault, note, ok, warning
from edge_spec.models.devices import Device, format_bytes, free_bytes, total_bytes

CACHE_REMEDY = "Set EDGE_SPEC_CACHE to a directory that can be written."
_LEAST_DISK_BYTES = 1_000_000_000  # less leaves no room for the conversion of a small model


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
    """Return why nothing can be written in the cache; None where something can."""
    there = _nearest(cache)
    if not there.is_dir():
        return f"{there} is no directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def _nearest(cache: Path) -> Path:
    return next(path for path in (cache, *cache.absolute().parents) if path.exists())


def check_devices(devices: Sequence[Device]) -> Iterator[Finding]:
    if all(device.name is None or device.fault for device in devices):
        yield fault("devices", "none can be used", 'Run: pip install "edge-spec[cpu]".')
    for device in devices:
        what = f"{device.runtime} {device.name or ''}".rstrip()
        if device.fault is None:
            said = ": ".join(filter(None, (device.description, device.kernels)))
            yield ok("devices", f"{what}: {said}")
        elif device.name is None:
            yield note("devices", f"not {what}: {device.fault}")
        else:
            remedy = "Update its driver, or leave it out of --device."
            yield warning("devices", f"{what}: {device.fault}", remedy)
        if device.hint is not None:
            yield note("devices", device.hint, "Build it for this processor: docs/gguf.md.")


def check_caches(cache: Path) -> Iterator[Finding]:
    """Say how much is kept, and what an interruption left. A file that cannot be read is made again
    where it is used."""
    kept = [path for path in sorted(cache.glob("*")) if path.is_dir()]
    sizes = [f"{path.name} {format_bytes(_num_bytes(path))}" for path in kept]
    yield ok("kept", ", ".join(sizes) or "nothing")
    left = list(cache.glob("*/.*.part"))
    if left:
        yield note(
            "leftovers",
            f"{len(left)} of work that was interrupted, or goes on, "
            f"{format_bytes(sum(map(_num_bytes, left)))}",
            f"Delete {cache}/*/.*.part while edge-spec does not run.",
        )


def _num_bytes(path: Path) -> int:
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # whose work has ended meanwhile
            size += file.lstat().st_size
    return size
