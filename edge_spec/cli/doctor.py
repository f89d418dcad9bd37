"""`edge-spec doctor [MODEL] [--draft MODEL]`: will it work here, will it pay, and if not, why."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json, print_table, require_writable
from edge_spec.models.asked_options import Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_spec.core.model import Progress
    from edge_spec.diagnostics.doctor.diagnose import Report
    from edge_spec.diagnostics.doctor.finding import Finding
    from edge_spec.models.options import LoadOptions

_COLORS = {"note": "cyan", "warning": "yellow", "fault": "red"}
_RUN = "With --run"


@dataclass(frozen=True)
class DoctorOptions:
    """Declares what is examined, and where it would run."""

    draft: Annotated[
        str | None,
        Option(
            "A smaller model that is to draft for it, auto, or none.  [default: a pair bundle's "
            "own]",
            None,
            metavar="MODEL",
        ),
    ] = None
    runtime: Annotated[str, Option("The model's runtime, as it would be opened with.", None)] = (
        "auto"
    )
    device: Annotated[str | None, Option("Where the model would run.", None)] = None
    draft_runtime: Annotated[str, Option("The draft's runtime.", None)] = "auto"
    draft_device: Annotated[str | None, Option("Where the draft would run.", None)] = None
    context: Annotated[int | None, Option("Tokens of context, if not the model's own.", None)] = (
        None
    )
    open_models: Annotated[bool, Option("Open every variant, too.", None, flag="--open")] = False
    hashes: Annotated[
        bool, Option("Hash the files of bundles above 1 GB, too.", None, flag="--hash")
    ] = False
    out: Annotated[
        Path | None, Option("A directory for report.md and report.json, to be handed on.", None)
    ] = None
    run: Annotated[
        bool,
        Option(
            "Then open the models there and try everything, each check in a process of its own.",
            _RUN,
            flag="--run",
        ),
    ] = False
    soak_s: Annotated[float, Option("Seconds of the same requests.", _RUN, least=0)] = 60.0
    source_language: Annotated[
        str | None, Option("Of what a translator of many languages reads.", _RUN, metavar="NAME")
    ] = None
    target_language: Annotated[
        str | None, Option("Of what it writes, such as fra_Latn.", _RUN, metavar="NAME")
    ] = None

    @property
    def places(self) -> LoadOptions:
        """Raises UsageError for options that contradict each other."""
        from edge_spec.models.options import LoadOptions

        return LoadOptions(
            runtime=self.runtime,
            device=self.device,
            draft_runtime=self.draft_runtime,
            draft_device=self.draft_device,
            context_length=self.context,
            source_language=self.source_language,
            target_language=self.target_language,
        )


@options.with_groups
def doctor(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    *,
    asked: DoctorOptions,
    json: options.Json = False,
) -> None:
    """Examine this machine, and whether a model or a pair will work on it, and pay.

    Nothing is fetched, converted or loaded, but with --run. Exit status 1: there is a fault.
    """
    from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
    from edge_spec.diagnostics.doctor.document import document
    from edge_spec.models.source import Source

    if asked.out is not None:
        require_writable(asked.out)
    request = DiagnosisRequest(model, asked.draft, asked.open_models, asked.hashes, asked.places)
    with ProgressBar() as progress:
        if asked.run:
            _ = Source(model, progress).path  # fetches it
        report = diagnose(request, progress)
        _write(report, model, asked)
        is_whole = not asked.run or _run(report, model, asked, progress)
    if json:
        print_json(document(report))
    else:
        _print(report)
    if not is_whole:
        raise KeyboardInterrupt
    if report.verdict == "faults":
        raise typer.Exit(1)


def _run(report: Report, model: str, asked: DoctorOptions, progress: Progress) -> bool:
    """Adds what the checks of the device find, and returns whether all were made: Ctrl-C leaves
    what is there."""
    from edge_spec.diagnostics.device_check import DeviceCheckRequest, run_checks
    from edge_spec.diagnostics.doctor.document import files_sha256
    from edge_spec.diagnostics.doctor.finding import note

    chosen = report.chosen
    if chosen is None:
        report.add("run", [note("run", "nothing was tried: the models would not be opened")])
        return True
    for opening in chosen.openings:
        report.numbers.setdefault(opening.role, {})["sha256"] = files_sha256(opening.source)
    request = DeviceCheckRequest.of(chosen, asked.places, asked.soak_s)
    request.prepare(progress)

    def add(findings: Sequence[Finding]) -> None:
        report.findings += findings
        _write(report, model, asked)

    try:
        run_checks(request, progress, add)
    except KeyboardInterrupt:
        add([note("run", "interrupted: further checks were not reached").of("run")])
        return False
    return True


def _write(report: Report, model: str, asked: DoctorOptions) -> None:
    """Writes the report after each check, so that one that takes the machine down leaves what was
    found before."""
    from edge_spec.diagnostics.doctor.document import markdown, public_document
    from edge_spec.diagnostics.report_files import write_report

    if asked.out is not None:
        found = public_document(report, [each for each in (model, asked.draft) if each])
        write_report(asked.out, found, markdown(found))


def _print(report: Report) -> None:
    between = "\n-> " if sys.stdout.isatty() else " -> "
    rows: list[tuple[str, tuple[str, ...]]] = []
    for group, findings in report.grouped.items():
        rows.append(("bold", (group, "", "")))
        for each in findings:
            told = between.join(
                " ".join(part.split()) for part in (each.found, each.remedy) if part
            )
            level = str(each.level)
            rows.append((_COLORS.get(level, ""), (f"  {level}", each.check, told)))
    print_table(rows)
    levels = [str(finding.level) for finding in report.findings]
    counts = {level: levels.count(level) for level in ("fault", "warning", "note")}
    found = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())
    print(f"{found}{_summary(report)}")


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
