"""Runs the checks of `edge-spec doctor`, in order, each on the same subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from edge_spec.core.model import Progress
from edge_spec.diagnostics.doctor.chat import check_template
from edge_spec.diagnostics.doctor.families import check_family
from edge_spec.diagnostics.doctor.files import check_files, check_manifests, check_profiles
from edge_spec.diagnostics.doctor.finding import Finding, Severity, fault, warning
from edge_spec.diagnostics.doctor.scores import check_scores
from edge_spec.diagnostics.doctor.subject import Subject, open_subject
from edge_spec.diagnostics.doctor.text import (
    check_architecture,
    check_ends,
    check_tokenizer,
    check_vocabulary,
)
from edge_spec.errors import EdgeSpecError, MissingDependencyError

Check = Callable[[Subject], Iterator[Finding]]

# After a stage with a fault, the next ones would only find it again.
_FIRST: tuple[dict[str, Check], ...] = ({"files": check_files}, {"manifest": check_manifests})
_DESCRIBED: dict[str, Check] = {
    "architecture": check_architecture,
    "family": check_family,
    "tokenizer": check_tokenizer,
    "vocabulary": check_vocabulary,
    "profiles": check_profiles,
}
_CHAT: dict[str, Check] = {"chat template": check_template, "end of text": check_ends}
_OPENING: dict[str, Check] = {"scores": check_scores}


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
    described = _DESCRIBED | (_CHAT if chats else {})
    for checks in (*_FIRST, described, _OPENING if open_models else {}):
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
