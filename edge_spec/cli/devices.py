"""`edge-spec devices` and `plan`: what models can run on here, and where one runs best."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_result, table_lines
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import ENDPOINT, RPC_HELP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edge_spec.models.devices import Device
    from edge_spec.placement.plan import Placement, Plan


def devices(
    rpc: Annotated[list[str] | None, typer.Option(help=RPC_HELP, metavar=ENDPOINT)] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A Core ML bundle: show where its operations run, instead.", metavar="BUNDLE"
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the devices that models can run on, and what keeps the others from it."""
    if model is not None:
        if rpc:
            raise UsageError(
                "--model and --rpc do not go together", remedy="Leave one of them out."
            )
        _show_placements(model, json)
        return
    from edge_spec.core.endpoint import Endpoint
    from edge_spec.models.devices import list_devices

    for server in rpc or ():
        Endpoint.parse(server)
    found = list_devices(rpc or ())
    columns = ("runtime", "device", "kind", "memory", "description")
    document = {"devices": [asdict(device) for device in found]}
    print_result(json, document, table_lines(map(_row, found), columns))


def _show_placements(path: Path, json: bool) -> None:
    from edge_spec.models.bundle import open_bundle
    from edge_spec.models.devices import placements_of

    found = placements_of(open_bundle(path))
    columns = ("function", "operations", "estimated cost", "not on the chosen device")
    rows = (
        (
            each.function,
            ", ".join(f"{unit} {count}" for unit, count in each.operations.items()),
            ", ".join(f"{unit} {share:.1%}" for unit, share in each.shares.items()) or "-",
            ", ".join(f"{kind} {count}" for kind, count in each.fallbacks.items()) or "-",
        )
        for each in found
    )
    document = {"placements": [asdict(each) for each in found]}
    print_result(json, document, table_lines((("", cells) for cells in rows), columns))


def _row(device: Device) -> tuple[str, tuple[str, ...]]:
    said = (device.description, device.kernels, device.fault, device.hint)
    about = ": ".join(part for part in said if part)
    cells = (device.runtime, device.name or "-", device.kind or "-", _free_memory(device), about)
    return "red" if device.fault else "", cells


def _free_memory(device: Device) -> str:
    from edge_spec.models.devices import format_bytes

    if device.free_bytes is None and device.total_bytes is None:
        return "-"
    free, total = (
        "?" if size is None else format_bytes(size)
        for size in (device.free_bytes, device.total_bytes)
    )
    return f"{free} free of {total}"


def plan(
    model: options.Model = "smollm2",
    draft: Annotated[
        str | None, typer.Option(help="A smaller model that may draft for it, auto, or none.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure passes again that were measured before.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure where a model runs best on this machine, and whether a draft can pay there.

    From then on this model runs where it was fastest, unless options say otherwise.
    """
    from edge_spec.models.asked_options import AskedOptions
    from edge_spec.models.bundle import require_readable
    from edge_spec.models.devices import list_devices
    from edge_spec.models.draft_choice import chosen_drafts
    from edge_spec.models.source import Source
    from edge_spec.placement.plan import make_plan
    from edge_spec.scheduler.engine_plan import choose_plan, missing_reader, plans_for

    asked = AskedOptions(draft=draft)
    with ProgressBar() as progress:
        target = Source(model, progress)
        drafts = chosen_drafts(target, asked)
        pair = Source(drafts[0], progress) if drafts else None
        if drafts:
            require_readable(Path(drafts[0]), "the draft of a plan")
        made = make_plan(target, pair, list_devices(), progress, refresh)
    chosen, _ = choose_plan(plans_for(target, asked))
    made = replace(made, in_force=chosen.explain())
    notes = [*made.notes, *filter(None, [missing_reader(target)])]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print_result(json, asdict(made), _plan_lines(made))


def _plan_lines(made: Plan) -> Iterator[str]:
    headings = ("place", "draft", "weights", "plain tokens/s", "memory", "why not")
    rows = list(map(_place_cells, made.placements))
    # Columns that are empty but for their heading are left out.
    columns = [column for column in zip(headings, *rows, strict=True) if {*column[1:]} != {"-"}]
    found, *cells = zip(*columns, strict=True)
    yield from table_lines((("", row) for row in cells), found)
    yield ""
    if lossless := made.placements[0].lossless:
        yield f"texts there, with and without drafting: {lossless}"
    yield from made.in_force


def _place_cells(placement: Placement) -> tuple[str, ...]:
    step_s, memory = placement.step_s, placement.memory_bytes
    return (
        str(placement.target),
        "-" if placement.draft is None else str(placement.draft),
        placement.target.weights,
        "-" if step_s is None else f"{1 / step_s:.1f}",
        "-" if memory is None else _memory(memory, placement.on_devices),
        placement.reason or "the best",
    )


def _memory(main: int, on_devices: Mapping[str, int]) -> str:
    from edge_spec.models.devices import format_bytes

    parts = [f"{format_bytes(needed)} on {label}" for label, needed in on_devices.items()]
    return " + ".join([format_bytes(main), *parts])
