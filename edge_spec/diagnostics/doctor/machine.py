"""What there is to run on: versions, memory, disk, devices, the runtimes that can run a model; and
whether what edge-spec keeps can be read again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from edge_spec.diagnostics.doctor.report import Finding, fault, note, ok, warning
from edge_spec.drafters.lookup.answers import check_answers
from edge_spec.engine.snapshot_file import check_beginning
from edge_spec.errors import EdgeSpecError, ModelFileError
from edge_spec.fitting.devices import Device
from edge_spec.fitting.memory import format_bytes, free_bytes, total_bytes
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle, open_unhashed
from edge_spec.models.model_text import SUFFIX, read_kept_tokenizer
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_history import check_history
from edge_spec.models.runtime_choice import where_it_runs
from edge_spec.models.source import Source
from edge_spec.placement.plan import read_plan
from edge_spec.placement.profile import read_key
from edge_spec.placement.row_findings import read_rows
from edge_spec.storage.digests import check_digests

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


_SHOWN = 3
_GGUF = b"GGUF"
_NAMED_BYTES = 1_000_000  # less is not worth telling
_REMEDY = "Delete it: it is made again where it is needed."


class Kind(NamedTuple):
    directory: str
    pattern: str
    check: Callable[[Path], object]  # raises EdgeSpecError, OSError


def _check_conversion(path: Path) -> None:
    if is_bundle(path):
        open_unhashed(path)
        return
    with path.open("rb") as file:  # the header of a GGUF file takes most of a second to read
        if file.read(len(_GGUF)) != _GGUF:
            raise ModelFileError(f"{path} is no bundle and no GGUF file", remedy=_REMEDY)


KINDS = (
    Kind("bundles", "[!.]*", _check_conversion),
    Kind("tokenizers", f"*{SUFFIX}", read_kept_tokenizer),
    Kind("prompts", "[!.]*", check_beginning),
    Kind("profiles", "*.json", read_key),
    Kind("rows", "*.json", read_rows),
    Kind("digests", "*.json", check_digests),
    Kind("plans", "*.json", read_plan),
    Kind("pairs", "*.json", check_history),
    Kind("answers", "*.json", check_answers),
)


def check_caches(cache: Path) -> Iterator[Finding]:
    """Changes nothing. Conversions are not hashed: opening one does."""
    counts, problems = [], []
    for kind in KINDS:
        found = [
            path
            for path in sorted((cache / kind.directory).glob(kind.pattern))
            if not path.name.startswith(".") and path.suffix not in (".lock", ".sha256")
        ]
        size = sum(map(_num_bytes, found))
        total = f" ({format_bytes(size)})" if size >= _NAMED_BYTES else ""
        counts.append(f"{kind.directory} {len(found)}{total}")
        problems += [(path, why) for path in found if (why := _problem(kind, path)) is not None]
    for path, why in problems[:_SHOWN]:
        yield warning(path.parent.name, f"{path.name}: {why}", _REMEDY)
    if len(problems) > _SHOWN:
        yield warning("kept", f"{len(problems) - _SHOWN} more cannot be read", "Delete them.")
    kinds = ("models", "conversions", *(kind.directory for kind in KINDS))
    # What a kill left, also of an older version's conversions.
    left = [path for kind in kinds for path in (cache / kind).glob(".*.part")]
    if left:
        size = sum(map(_num_bytes, left))
        yield note(
            "leftovers",
            f"{len(left)} of work that was interrupted, or goes on, {format_bytes(size)}",
            f"Delete {cache}/*/.*.part while edge-spec does not run.",
        )
    if not problems:
        yield ok("kept", ", ".join(counts))


def _problem(kind: Kind, path: Path) -> str | None:
    try:
        kind.check(path)
    except EdgeSpecError as error:
        return error.shown.removeprefix(f"{path} ")
    except OSError as error:
        return str(error.strerror or error)
    return None


def _num_bytes(path: Path) -> int:
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # whose work has ended meanwhile
            size += file.lstat().st_size
    return size
