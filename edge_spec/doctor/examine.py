"""Runs the checks of `edge-spec doctor`, in order, each on the same subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from edge_spec.doctor.files import check_files, check_manifests, check_profiles
from edge_spec.doctor.finding import Finding, Level, fault, warning
from edge_spec.doctor.scores import check_scores
from edge_spec.doctor.subject import Subject, open_subject
from edge_spec.doctor.text import (
    check_architecture,
    check_ends,
    check_template,
    check_tokenizer,
    check_vocabulary,
)
from edge_spec.errors import EdgeSpecError, MissingDependencyError, ModelFileError
from edge_spec.model import Progress

Check = Callable[[Subject], Iterator[Finding]]

# Behind a stage with a fault, the next ones would only find it again.
_STAGES: tuple[dict[str, Check], ...] = (
    {"files": check_files},
    {"manifest": check_manifests},
    {
        "architecture": check_architecture,
        "tokenizer": check_tokenizer,
        "vocabulary": check_vocabulary,
        "chat template": check_template,
        "end of text": check_ends,
        "profiles": check_profiles,
    },
)
_OPENING: dict[str, Check] = {"scores": check_scores}


def examine(path: Path, progress: Progress, *, open_models: bool = True) -> list[Finding]:
    """open_models: opens every variant that something installed can open, which takes the memory
    of the largest. Raises UsageError for what is no bundle and no GGUF file."""
    try:
        subject = open_subject(path, progress)
    except ModelFileError as error:
        return [fault("manifest", error.message, error.remedy)]
    findings: list[Finding] = []
    for checks in (*_STAGES, _OPENING if open_models else {}):
        for name, check in checks.items():
            findings += _run(name, check, subject)
        if any(each.level is Level.FAULT for each in findings):
            break
    return findings


def _run(name: str, check: Check, subject: Subject) -> list[Finding]:
    """An error that a user can act on is a finding, too."""
    findings: list[Finding] = []
    try:
        findings.extend(check(subject))
    except MissingDependencyError as error:
        findings.append(warning(name, f"not checked: {error.message}", error.remedy))
    except OSError as error:
        findings.append(fault(name, str(error), "Check the disk and the file's permissions."))
    except EdgeSpecError as error:
        findings.append(fault(name, error.message, error.remedy))
    return findings
