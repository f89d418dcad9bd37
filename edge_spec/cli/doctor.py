"""`edge-spec doctor [MODEL] [--draft MODEL]`: will it work here, will it pay, and if not, why."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_spec.diagnostics.doctor.diagnose import Report
    from edge_spec.diagnostics.doctor.finding import Finding

_COLORS = {"note": "cyan", "warning": "yellow", "fault": "red"}
_LEAST_COLUMNS = 60  # in fewer, text begins further left


def doctor(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    draft: Annotated[
        str | None,
        typer.Option(
            help="A smaller model that is to draft for it, auto, or none.  [default: a pair "
            "bundle's own]",
            metavar="MODEL",
        ),
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="The model's runtime, as it would be opened with.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="Where the model would run.")] = None,
    draft_runtime: Annotated[str, typer.Option(help="The draft's runtime.")] = "auto",
    draft_device: Annotated[str | None, typer.Option(help="Where the draft would run.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of context, if not the model's own.")
    ] = None,
    open_models: Annotated[
        bool, typer.Option("--open", help="Open every variant, too, and compare their scores.")
    ] = False,
    hashes: Annotated[
        bool, typer.Option("--hash", help="Hash the files of bundles above 1 GB, too.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Examine this machine, and whether a model or a pair will work on it, and pay.

    Nothing is fetched, converted or loaded. Exit status 1: there is a fault.
    """
    from edge_spec.cli.progress import ProgressBar
    from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
    from edge_spec.models.options import LoadOptions

    places = LoadOptions(
        runtime=runtime,
        device=device,
        draft_runtime=draft_runtime,
        draft_device=draft_device,
        context_length=context,
    )
    with ProgressBar() as progress:
        report = diagnose(DiagnosisRequest(model, draft, open_models, hashes, places), progress)
    if json:
        from dataclasses import asdict
        from json import dumps

        findings = [asdict(finding) for finding in report.findings]
        document = {"verdict": report.verdict, "findings": findings, **report.numbers}
        print(dumps(document, ensure_ascii=False))
    else:
        _print(report)
    if report.verdict == "faults":
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    width = max(len(finding.check) for finding in report.findings)
    folds = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=not folds)
    columns = console.width if folds else None
    for group, findings in report.grouped.items():
        console.print(Text(group, style="bold"))
        for finding in findings:
            level = str(finding.level)
            for line in lines(finding, width, columns):
                console.print(Text(line, style=_COLORS.get(level, "")))
    levels = [str(finding.level) for finding in report.findings]
    counts = {level: levels.count(level) for level in ("fault", "warning", "note")}
    found = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())
    console.print(Text(f"{found}{_summary(report)}"))


def _summary(report: Report) -> str:
    """Will it work, will it pay; "" where only the machine was examined."""
    if "target" not in report.numbers:
        return ""
    if report.verdict == "faults":
        return ": it will not work like this"
    speedup = report.numbers.get("speedup", {})
    expected = speedup.get("use") or speedup.get("plan")
    if expected is None:
        return ": it works; whether it pays is not measured"
    if expected > 1:
        return f": it works, and speculation pays ({expected:.2f} times)"
    return ": it works; speculation does not pay, and rounds stay plain"


def lines(finding: Finding, width: int, columns: int | None) -> Iterator[str]:
    """columns: that lines are folded at; None: they are not."""
    head = f"  {finding.level:<8}{finding.check:<{width}}  "
    text = _printable(finding.found)
    remedy = f"-> {_printable(finding.remedy)}" if finding.remedy else ""
    if columns is None:
        yield f"{head}{text} {remedy}".rstrip()
        return
    import textwrap

    behind = " " * (len(head) if columns >= _LEAST_COLUMNS else 4)
    fold = partial(textwrap.wrap, width=columns, break_on_hyphens=False)  # options stay whole
    yield from fold(head + text, subsequent_indent=behind)
    if remedy:
        yield from fold(remedy, initial_indent=behind, subsequent_indent=behind + "   ")


def _printable(text: str) -> str:
    """Puts the text on one line: a model may have any character in its tokens and names."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))
