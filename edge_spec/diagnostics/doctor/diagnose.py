"""The whole examination of `edge-spec doctor`: of this machine, and of a model or a pair on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.diagnostics.doctor.chosen import (
    Chosen,
    Opening,
    check_memory,
    check_pair,
    check_speed,
    choose,
    compare_tokens,
    require_convertible,
)
from edge_spec.diagnostics.doctor.machine import (
    CACHE_REMEDY,
    check_caches,
    check_devices,
    check_disk,
    check_machine,
    check_runtimes,
    refusal,
)
from edge_spec.diagnostics.doctor.report import Finding, Report, Severity, fault, note, ok, warning
from edge_spec.diagnostics.doctor.subject import (
    OTHER_FORMAT,
    Subject,
    check_architecture,
    check_ends,
    check_files,
    check_opening,
    check_template,
    check_tokenizer,
    check_vocabulary,
    open_subject,
)
from edge_spec.errors import EdgeSpecError, MissingDependencyError
from edge_spec.fitting.devices import Device, list_devices
from edge_spec.loader.head import open_tables
from edge_spec.loader.place import head_path
from edge_spec.loader.target_sample import require_own_target
from edge_spec.models import runtimes
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_bundle import ROLES
from edge_spec.models.source import Source
from edge_spec.placement.machine import describe_machine
from edge_spec.storage.atomic import cache_directory

Check = Callable[[Subject], Iterator[Finding]]

# After a stage with a fault, the next ones would only find it again.
_FIRST: tuple[dict[str, Check], ...] = (
    {"files": check_files},
    {"architecture": check_architecture},
)
_DESCRIBED: dict[str, Check] = {
    "tokenizer": check_tokenizer,
    "vocabulary": check_vocabulary,
}
_CHAT: dict[str, Check] = {"chat template": check_template, "end of text": check_ends}


@dataclass(frozen=True)
class DiagnosisRequest:
    """draft: None is that of a pair bundle, "none" and "auto" as after --draft; hashes: as
    `Subject` has it; places: where both would be opened, as asked for."""

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
    """Nothing is fetched, converted or changed, and unless models are opened no weights are read.

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
    named = None if request.draft is None else [request.draft]
    try:
        drafts = chosen_drafts(source, named, "auto", is_planned=False)
        is_here = bool(drafts) and Source(drafts[0], progress).is_fetched
        path = head_path(drafts[0], source) if is_here else None
    except (EdgeSpecError, OSError) as error:
        report.add(ROLES[1], [problem("model", error)])
        return
    head = ""
    if path is not None:
        config, drafts = target.variants[0].config, ()
        report.add(ROLES[1], settled("head", check_head(path, config, source)))
        if report.verdict != "faults":
            head = runtimes.open_head(path, config, has_weights=False).drafted_by
    draft = Source(drafts[0], progress) if drafts else None
    drafting = None
    if draft is not None:
        if named is None and target.pair is not None:  # it was examined with its target
            drafting = target.roles[ROLES[1]][0]
        else:
            subject = _examined(draft, ROLES[1], request, report)
            drafting = None if subject is None else subject.variants[0]
    if report.verdict == "faults" or (draft is not None and drafting is None):
        return  # what follows would only find it again
    try:
        tokens = None if drafting is None else compare_tokens(target.variants[0], drafting)
        chosen = choose(source, draft, tokens, progress, request.places, head)
    except EdgeSpecError as error:
        report.add(ROLES[0], [fault("runtime", error.shown, error.remedy)])
        return
    for opening in chosen.openings:
        report.add(opening.role, check_choice(opening))
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


def check_choice(opening: Opening) -> Iterator[Finding]:
    """Says which runtime was chosen and why, where several were asked, and which is better."""
    order = opening.order
    if opening.fallback is not None:
        yield note("runtime", opening.fallback)
    elif order.reason:
        yield ok("runtime", order.reason)
    if order.better:
        yield note("runtime", order.better)


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
            opening.resolution.require_devices()
            if opening.prepared is None:
                require_convertible(opening)
        except EdgeSpecError as error:
            yield fault("runtime", error.shown, error.remedy).of(opening.role)


def _examined(
    source: Source, role: str, request: DiagnosisRequest, report: Report
) -> Subject | None:
    """Returns what was examined; None where it is not here, or no model."""
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


def examine(
    path: Path,
    progress: Progress,
    *,
    open_models: bool = False,
    hashes: bool = False,
    chats: bool = True,
    kept: Callable[[], Path] | None = None,
) -> tuple[Subject | None, list[Finding]]:
    """The model at `path`, None where it is none.

    open_models: opens every variant that something installed can open, which takes the memory of
    the largest. hashes: as `Subject` has it. chats: whether it is to answer, with its template.
    kept: as `open_subject` has it.
    """
    try:
        subject = open_subject(path, progress, hashes, kept)
    except MissingDependencyError as error:  # what it lacks, starting it lacks, too
        return None, [fault("model", error.shown, error.remedy)]
    except (EdgeSpecError, OSError) as error:
        return None, [problem("model", error)]
    findings: list[Finding] = []
    opening: dict[str, Check] = {"opens": check_opening} if open_models else {}
    for checks in (*_FIRST, _DESCRIBED | (_CHAT if chats else {}), opening):
        for name, check in checks.items():
            findings += settled(name, check(subject))
        if any(each.level is Severity.FAULT for each in findings):
            break
    return subject, findings


def settled(name: str, found: Iterator[Finding]) -> list[Finding]:
    """An error that a user can act on is a finding, too."""
    findings: list[Finding] = []
    try:
        findings.extend(found)
    except (EdgeSpecError, OSError) as error:
        findings.append(problem(name, error))
    return findings


def problem(name: str, error: EdgeSpecError | OSError) -> Finding:
    if not isinstance(error, EdgeSpecError):
        return fault(name, str(error), "Check the disk and the file's permissions.")
    if isinstance(error, MissingDependencyError):
        return warning(name, f"not checked: {error.shown}", error.remedy)
    return fault(name, error.shown, error.remedy)
