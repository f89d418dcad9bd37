"""`edge-spec accept [MODEL] --device X`: does all of it work on this device?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_spec.cli import options
from edge_spec.cli.output import require_writable
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec.diagnostics.accept.request import AcceptRequest

_PIPE_COLUMNS = 10_000  # a line of a pipe is never folded


def accept(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    device: Annotated[
        str, typer.Option(help="Where the model is to run: a name of edge-spec devices.")
    ] = "cpu",
    runtime: Annotated[
        str, typer.Option(help="The model's runtime; auto: one that lists the device.")
    ] = "auto",
    draft: Annotated[
        str | None, typer.Option(help="A smaller model that drafts for it.", metavar="MODEL")
    ] = None,
    draft_device: Annotated[
        str | None, typer.Option(help="Where the draft is to run.  [default: cpu]")
    ] = None,
    draft_runtime: Annotated[str, typer.Option(help="The draft's runtime.")] = "auto",
    source_language: Annotated[
        str | None,
        typer.Option(help="Of what a translator of many languages reads.", metavar="NAME"),
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(help="Of what it writes, such as fra_Latn.", metavar="NAME")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="How long it may take; half of it is soak.")
    ] = 10.0,
    out: Annotated[
        Path, typer.Option(help="A directory for the report, a page and a JSON document.")
    ] = Path(),
    json: options.Json = False,
) -> None:
    """Try everything on a device, and write a report to attach to an issue.

    Each check runs in a process of its own and none ends the others; Ctrl-C writes what is there.
    Exit status 1: a check failed.
    """
    from edge_spec.diagnostics.accept.request import AcceptRequest

    _require_sensible(minutes, draft, draft_device)
    require_writable(out)
    if draft is not None and draft_device is None:
        draft_device = "cpu"
    request = AcceptRequest(
        model,
        device,
        runtime,
        draft,
        draft_device,
        draft_runtime,
        source_language=source_language,
        target_language=target_language,
    )
    report = _run(request, minutes * 60, out)
    if json:
        from json import dumps

        print(dumps(report, ensure_ascii=True))
    else:
        _print(report)
    if report["interrupted"]:
        raise KeyboardInterrupt
    if report["failed"] or not report["passed"]:
        raise typer.Exit(1)


def _run(request: AcceptRequest, seconds: float, out: Path) -> dict[str, Any]:
    """Writes the report after each check, so that one that takes the machine down leaves what was
    found before."""
    import time

    from edge_spec.cli.progress import ProgressBar
    from edge_spec.diagnostics.accept import report as reports
    from edge_spec.diagnostics.accept.runner import AcceptRun, prepare, with_runtime
    from edge_spec.fitting.devices import list_devices
    from edge_spec.models.source import Source

    written: list[Path] = []
    with ProgressBar() as progress:
        models = {"target": reports.model_of(Source(request.model, progress))}
        if request.draft is not None:
            models["draft"] = reports.model_of(Source(request.draft, progress))
        progress("Listing the devices", 0.0)
        devices = list_devices()
        machine = reports.machine_of(devices)
        request = with_runtime(request, devices)

        def document() -> dict[str, Any]:
            return reports.document(run, machine, models, time.monotonic() - began)

        def write() -> None:
            written[:] = reports.write_report(document(), out)

        run = AcceptRun(request, seconds, progress, write)
        prepare(request, progress)
        began = time.monotonic()
        run.run(devices)
    for path in written:
        print(f"Written: {path}", file=sys.stderr)
    return document()


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    from edge_spec.diagnostics.accept.report import print_report

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    print_report(report, Console(width=width, highlight=False))


def _require_sensible(minutes: float, draft: str | None, draft_device: str | None) -> None:
    if not 0 < minutes <= 24 * 60:  # NaN, too
        raise UsageError(f"minutes is {minutes}", remedy="It has to be above 0, such as 10.")
    if draft is None and draft_device is not None:
        raise UsageError(
            "--draft-device is for a draft, and there is none", remedy="Name one with --draft."
        )
