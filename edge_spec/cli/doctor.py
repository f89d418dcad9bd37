"""`edge-spec doctor BUNDLE`: whether a bundle is whole and can be relied on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_spec.doctor.finding import Finding


def doctor(
    bundle: Annotated[
        str,
        typer.Argument(help="A pair bundle, a bundle, a GGUF file or smollm2.", show_default=False),
    ],
    open_models: Annotated[
        bool,
        typer.Option("--open/--no-open", help="Open every variant and compare their scores."),
    ] = True,
    json: options.Json = False,
) -> None:
    """Check a bundle's files, tokenizer, chat template and scores. Exit status 1: a fault."""
    from edge_spec.cli.progress import ProgressBar
    from edge_spec.doctor.examine import examine
    from edge_spec.doctor.finding import Level
    from edge_spec.sources import Source

    with ProgressBar() as progress:
        path = Source(bundle, progress).path
        findings = examine(path, progress, open_models=open_models)
    is_sound = all(finding.level is not Level.FAULT for finding in findings)
    if json:
        from dataclasses import asdict
        from json import dumps

        found = [asdict(finding) for finding in findings]
        print(dumps({"path": str(path), "ok": is_sound, "findings": found}, ensure_ascii=False))
    else:
        _print(findings)
    if not is_sound:
        raise typer.Exit(1)


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        remedy = f". {finding.remedy}" if finding.remedy else ""
        line = f"{finding.level:<8}{finding.check:<{width}}  {finding.found}{remedy}"
        print(" ".join(line.splitlines()))
    levels = [str(finding.level) for finding in findings]
    print(f"{levels.count('fault')} faults, {levels.count('warning')} warnings")
