"""Examine the machine, the caches, and the models and plan of a start for `edge-spec doctor`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_spec.core import entry_points
from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import AssistantHead
from edge_spec.core.model import Progress
from edge_spec.diagnostics.doctor.engine import check_memory, check_pair, check_speed
from edge_spec.diagnostics.doctor.model import (
    Examined,
    check_ends,
    check_files,
    check_model,
    check_template,
)
from edge_spec.diagnostics.doctor.report import Finding, Report, fault, note, ok, problem, warning
from edge_spec.errors import EdgeSpecError, install
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import ROLES
from edge_spec.models.devices import Device, format_bytes, free_bytes, list_devices, total_bytes
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.source import Source
from edge_spec.scheduler.engine_plan import EnginePlan, choose_plan, plans_for
from edge_spec.scheduler.machine import describe_machine
from edge_spec.storage.atomic import cache_directory

_CACHE_REMEDY = "Set EDGE_SPEC_CACHE to a directory that can be written."
_LEAST_DISK_BYTES = 1_000_000_000  # less is too little to convert a small model


def diagnose(
    model: str,
    asked: AskedOptions,
    progress: Progress,
    *,
    hashes: bool = False,
    devices: Callable[[], list[Device]] = list_devices,
) -> Report:
    """Fetch, convert and change nothing, and read no weights.

    asked: options of the start. hashes: also of files that take seconds. Raises UsageError.
    """
    report = Report()
    with ThreadPoolExecutor(1) as aside:
        listed = aside.submit(devices)  # other processes, which take seconds
        machine = describe_machine()
        report.examined |= {"machine": machine, "versions": machine["versions"]}
        report.add("machine", "machine", check_machine(machine))
        report.add("machine", "disk", check_disk(cache_directory()))
        _diagnose_models(Source(model, progress), asked, hashes, report)
        report.add("caches", "kept", check_caches(cache_directory()))
        found = listed.result()
    report.examined["devices"] = [asdict(device) for device in found]
    report.add("machine", "devices", check_devices(found))
    return report


def _diagnose_models(source: Source, asked: AskedOptions, hashes: bool, report: Report) -> None:
    if not _is_here(source, ROLES[0], hashes, report):
        return
    try:
        drafts = [Source(name, source.progress) for name in chosen_drafts(source, asked)]
    except (EdgeSpecError, OSError) as error:
        report.findings.append(problem("model", error).of(ROLES[1]))
        return
    for draft in drafts:
        in_pair = source.member is not None and draft.model == str(source.member.draft)
        if not _is_here(draft, ROLES[1], hashes, report, in_pair):
            return
    opening = _opening(source, asked, report)
    if opening is None:
        return
    plan, models = opening
    report.examined["plan"] = plan.explain()
    for each in models:
        report.add(each.role, "tokenizer", check_model(each))
    target, *others = models
    head, config = plan.options.head, target.config
    if head is not None and config is not None:
        report.add(ROLES[1], "head", check_head(head, config))
    if report.verdict == "faults":
        return  # later checks would only find it again
    if config is not None:
        vocab_size = config.vocab_size
        report.add(ROLES[0], "chat template", check_template(target.text, vocab_size))
        report.add(ROLES[0], "end of text", check_ends(target, vocab_size))
    report.runtime = None if report.verdict == "faults" else plan.target.name
    refused = refusal(cache_directory())
    if refused is not None and any(each.prepared is None for each in models):
        found = fault("conversion", f"{refused}: nothing can be converted", _CACHE_REMEDY)
        report.add(ROLES[0], "conversion", [found])
    for other in others[:1]:
        report.add("pair", "tokens", check_pair(target, other))
    report.add("memory", "forecast", check_memory(plan, models))
    report.add("speed", "break-even", check_speed(plan, models))


def _is_here(
    source: Source, role: str, hashes: bool, report: Report, in_pair: bool = False
) -> bool:
    """Report on a model's files; return False after a fault. in_pair: they were checked with the
    target's."""
    num_found = len(report.findings)
    report.add(role, "model", _check_source(source, role, report))
    if role not in report.examined:
        return False
    if not in_pair:
        report.add(role, "files", check_files(source, hashes))
    return all(each.level != "fault" for each in report.findings[num_found:])


def _check_source(source: Source, role: str, report: Report) -> Iterator[Finding]:
    """A missing demo model, the default, is no fault."""
    if source.is_fetched:
        report.examined[role] = {"model": source.model, "path": str(source.path)}
        return
    found = f"{source.model} is not here: it has not been fetched yet"
    if not source.is_demo:
        yield fault("model", found, f"Fetch it: edge-spec pull {source.model}.")
        return
    remedy = f"The first start fetches it: edge-spec generate {source.model} Hi."
    yield note("model", found, remedy) if role == ROLES[0] else fault("model", found, remedy)


def _opening(
    source: Source, asked: AskedOptions, report: Report
) -> tuple[EnginePlan, list[Examined]] | None:
    """Return the plan, target and drafts of a start; None if it would refuse."""
    role = ROLES[0]
    try:
        plan, _ = choose_plan(plans_for(source, asked))
        for name in plan.drafter.split(",") if plan.drafter != "none" else ():
            entry_points.load_plugin("drafters", name.strip())
        report.add(role, "engine", _check_choice(plan))
        models = [Examined.of(role, plan.target, source.progress)]
        role = ROLES[1]
        models += [Examined.of(role, each, source.progress) for each in plan.drafts]
    except (EdgeSpecError, OSError) as error:
        report.findings.append(problem("runtime", error).of(role))
        return None
    return plan, models


def _check_choice(plan: EnginePlan) -> Iterator[Finding]:
    what, _, told = plan.explain()[0].partition(": ")
    yield note(what, told) if plan.target.refusals else ok(what, told)


def check_head(path: Path, target: ModelConfig) -> Iterator[Finding]:
    """Raises an EdgeSpecError for a damaged or unsupported head, or another target's."""
    head = runtimes.open_head(path, target)
    if not isinstance(head, AssistantHead):
        runtimes.load_runtime("ort")  # it runs the head
    yield ok("head", str(head))


def check_machine(machine: Mapping[str, Any]) -> Iterator[Finding]:
    """machine: see `describe_machine`."""
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
        yield warning("disk", f"{refused}: what is learnt is not kept", _CACHE_REMEDY)
    elif free < _LEAST_DISK_BYTES:
        yield warning("disk", found, "Free some, or set EDGE_SPEC_CACHE to another disk.")
    else:
        yield ok("disk", found)


def refusal(cache: Path) -> str | None:
    """Return why the cache cannot be written, if so."""
    there = _nearest(cache)
    if not there.is_dir():
        return f"{there} is no directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def _nearest(cache: Path) -> Path:
    return next(path for path in (cache, *cache.absolute().parents) if path.exists())


def check_devices(devices: Sequence[Device]) -> Iterator[Finding]:
    if all(device.name is None or device.fault for device in devices):
        yield fault("devices", "none can be used", f"{install('cpu')}.")
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


def check_caches(cache: Path) -> Iterator[Finding]:
    kept = [path for path in sorted(cache.glob("*")) if path.is_dir()]
    sizes = [f"{path.name} {format_bytes(_num_bytes(path))}" for path in kept]
    yield ok("kept", ", ".join(sizes) or "nothing")


def _num_bytes(directory: Path) -> int:
    size = 0
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):  # removed by its owner meanwhile
            size += file.lstat().st_size
    return size
