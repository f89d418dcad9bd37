"""The whole examination of `edge-spec doctor`: of this machine, of what edge-spec keeps on it, and
of a model or a pair here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.diagnostics.doctor.chosen import (
    Chosen,
    check_memory,
    check_pair,
    check_speed,
    choose,
    compare_tokens,
    require_convertible,
)
from edge_spec.diagnostics.doctor.report import (
    Finding,
    Report,
    capped,
    fault,
    note,
    ok,
    problem,
    settled,
    warning,
)
from edge_spec.diagnostics.doctor.subject import OTHER_FORMAT, Subject, examine
from edge_spec.drafters.lookup.answers import check_answers
from edge_spec.engine.snapshot_file import check_beginning
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
)
from edge_spec.loader.head import open_tables, require_own_target
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import ROLES, is_bundle, open_bundle
from edge_spec.models.devices import Device, format_bytes, free_bytes, list_devices, total_bytes
from edge_spec.models.draft_choice import chosen_drafts, head_path
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.model_text import SUFFIX, read_kept_tokenizer
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.machine import describe_machine
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.measurements import DIRECTORY, FILE, DamagedError, check_measurements

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
    """Find the installed runtimes that can run a model; a bundle is bound to one format, and the
    demo model is in all. Raises ModelFileError."""
    if source.is_demo or source.formats is not None or is_bundle(source.path):
        return
    can, refusals = [], []
    for name in runtimes.known_runtimes():
        try:
            plan = ModelPlan(source, name)
            if plan.runtime.reads == "checkpoint":
                runtimes.open_checkpoint(source.path)
            plan.screened()
        except (UnsupportedModelError, MissingDependencyError, DeviceError) as error:
            refusals.append(note("runtimes", f"not on {name}: {error.shown}"))
        else:
            can.append(name)
    if can:
        yield ok("runtimes", f"runs on {', '.join(can)}")
    yield from refusals


_NAMED_BYTES = 1_000_000  # less is not worth mentioning
_REMEDY = "Delete it: it is made again where it is needed."


def _check_conversion(path: Path) -> None:
    if is_bundle(path):
        open_bundle(path, hashed=False)
        return
    with path.open("rb") as file:  # the header of a GGUF file takes most of a second to read
        if file.read(4) != b"GGUF":
            raise ModelFileError(f"{path} is no bundle and no GGUF file", remedy=_REMEDY)


# Directories of the cache, the files in them, and what raises an EdgeSpecError,
# OSError or DamagedError for one.
_KEPT: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    ("bundles", "[!.]*", _check_conversion),
    ("tokenizers", f"*{SUFFIX}", read_kept_tokenizer),
    ("prompts", "[!.]*", check_beginning),
    (DIRECTORY, FILE, check_measurements),
    ("answers", "*.json", check_answers),
)


def check_caches(cache: Path) -> Iterator[Finding]:
    """Read what is kept, and change nothing. Conversions are not hashed: opening one does."""
    counts, problems = [], []
    for directory, pattern, check in _KEPT:
        found = [
            path
            for path in sorted((cache / directory).glob(pattern))
            if not path.name.startswith(".") and path.suffix not in (".lock", ".sha256")
        ]
        size = sum(map(_num_bytes, found))
        total = f" ({format_bytes(size)})" if size >= _NAMED_BYTES else ""
        counts.append(f"{directory} {len(found)}{total}")
        for path in found:
            try:
                check(path)
            except (EdgeSpecError, OSError, DamagedError) as error:
                why = error.shown if isinstance(error, EdgeSpecError) else str(error)
                why = why.removeprefix(f"{path} ")
                if isinstance(error, DamagedError):
                    why = f"holds no {directory} of this version: {why}"
                problems.append(warning(directory, f"{path.name}: {why}", _REMEDY))
    yield from capped(problems)
    # What a kill left, also of an older version's conversions.
    left = [
        path
        for directory in ("models", "conversions", *(directory for directory, _, _ in _KEPT))
        for path in (cache / directory).glob(".*.part")
    ]
    if left:
        yield note(
            "leftovers",
            f"{len(left)} of work that was interrupted, or goes on, "
            f"{format_bytes(sum(map(_num_bytes, left)))}",
            f"Delete {cache}/*/.*.part while edge-spec does not run.",
        )
    if not problems:
        yield ok("kept", ", ".join(counts))


def _num_bytes(path: Path) -> int:
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # whose work has ended meanwhile
            size += file.lstat().st_size
    return size


@dataclass(frozen=True)
class DiagnosisRequest:
    """draft: None is that of a pair bundle, "none" and "auto" as after --draft; hashes: as
    `Subject` has it; places: where both would be opened, as the user asked."""

    model: str
    draft: str | None = None
    open_models: bool = False
    hashes: bool = False
    places: LoadOptions = field(default_factory=LoadOptions)


def diagnose(
    request: DiagnosisRequest,
    progress: Progress,
    devices: Callable[[], list[Device]] = list_devices,
) -> Report:
    """Fetch, convert and change nothing, and unless models are opened read no weights.

    Raises UsageError for a request that makes no sense."""
    report = Report()
    with ThreadPoolExecutor(1) as aside:
        listed = aside.submit(devices)  # other processes, which take seconds
        machine = describe_machine()
        report.numbers |= {"machine": machine, "versions": machine["versions"]}
        report.add("machine", check_machine(machine))
        report.add("machine", settled("disk", check_disk(cache_directory())))
        _diagnose_models(request, progress, report)
        report.add("caches", check_caches(cache_directory()))
        found = listed.result()
    report.numbers["devices"] = [asdict(device) for device in found]
    report.add("machine", check_devices(found))
    return report


def _diagnose_models(request: DiagnosisRequest, progress: Progress, report: Report) -> None:
    source = Source(request.model, progress)
    target = _examined(source, ROLES[0], request, report)
    if target is None:
        return
    report.add(ROLES[0], settled("runtimes", check_runtimes(source)))
    try:
        drafts = chosen_drafts(source, AskedOptions(draft=request.draft))
        is_here = bool(drafts) and Source(drafts[0], progress).is_fetched
        path = head_path(drafts[0], source) if is_here else None
    except (EdgeSpecError, OSError) as error:
        report.add(ROLES[1], [problem("model", error)])
        return
    if path is not None:
        config, drafts = target.variants[0].config, ()
        report.add(ROLES[1], settled("head", check_head(path, config, source)))
    draft = Source(drafts[0], progress) if drafts else None
    drafting = None
    if draft is not None:
        if request.draft is None and target.pair is not None:  # it was examined with its target
            drafting = target.roles[ROLES[1]][0]
        else:
            subject = _examined(draft, ROLES[1], request, report)
            drafting = None if subject is None else subject.variants[0]
    if report.verdict == "faults" or (draft is not None and drafting is None):
        return  # what follows would only find it again
    try:
        tokens = None if drafting is None else compare_tokens(target.variants[0], drafting)
        chosen = choose(source, draft, tokens, progress, request.places, path)
    except EdgeSpecError as error:
        report.add(ROLES[0], [fault("runtime", error.shown, error.remedy)])
        return
    report.add(ROLES[0], check_choice(chosen))
    refusals = list(_refusals(chosen))
    if refusals:
        report.findings += refusals
        return
    report.chosen = chosen
    refused = refusal(cache_directory())
    if refused is not None and not chosen.is_converted:
        report.add(
            ROLES[0], [fault("conversion", f"{refused}: nothing can be converted", CACHE_REMEDY)]
        )
    if drafting is not None and tokens is not None:
        report.add("pair", check_pair(target.variants[0], drafting, tokens, report.numbers))
    report.add("memory", settled("forecast", check_memory(chosen, report.numbers)))
    report.add("speed", settled("break-even", check_speed(chosen, report.numbers)))


def check_choice(chosen: Chosen) -> Iterator[Finding]:
    """Say what a start would run the model on, and why."""
    what, _, told = chosen.plan.explain()[0].partition(": ")
    yield (note if chosen.plan.target.refusals else ok)(what, told)


def check_head(path: Path, target: ModelConfig, source: Source) -> Iterator[Finding]:
    """Raises an EdgeSpecError for a head that is damaged, not computed, or another target's."""
    head = runtimes.open_head(path, target)
    require_own_target(path, head, lambda: open_tables(source, f"the head {path} shares"))
    yield ok("head", str(head))


def _refusals(chosen: Chosen) -> Iterator[Finding]:
    """Yields what opening would refuse: devices that are not here, conversions that there are
    none of."""
    for opening in chosen.openings:
        try:
            opening.plan.require_devices()
            if opening.prepared is None:
                require_convertible(opening)
        except EdgeSpecError as error:
            yield fault("runtime", error.shown, error.remedy).of(opening.role)


def _examined(
    source: Source, role: str, request: DiagnosisRequest, report: Report
) -> Subject | None:
    """Return what was examined; None where it is not here, or no model."""
    try:
        if not source.is_fetched:
            report.add(role, [_not_here(source, role)])
            return None
        path = source.path
    except (EdgeSpecError, OSError) as error:
        report.add(role, [problem("model", error)])
        return None
    report.numbers[role] = {"model": source.model, "path": str(path)}
    subject, findings = examine(
        path,
        source.progress,
        open_models=request.open_models,
        hashes=request.hashes,
        chats=role == ROLES[0],
        kept=partial(source.cached, OTHER_FORMAT, ExportOptions()),
    )
    if role == ROLES[0]:
        report.findings += findings  # those of a pair bundle know their own groups
    else:
        report.add(role, findings)
    return subject


def _not_here(source: Source, role: str) -> Finding:
    """The demo model is what is examined where none was named: that it is missing is no fault."""
    found = f"{source.model} is not here: it has not been fetched yet"
    if not source.is_demo:
        return fault("model", found, f"Fetch it: edge-spec pull {source.model}.")
    remedy = f"The first start fetches it: edge-spec generate {source.model} Hi."
    return (note if role == ROLES[0] else fault)("model", found, remedy)
