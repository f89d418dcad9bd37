"""`edge-spec devices`: what models can run on here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.output import print_json, print_table
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec.fitting.devices import Device


def devices(
    rpc: Annotated[
        list[str] | None, typer.Option(help=options.RPC_HELP, metavar=options.ENDPOINT)
    ] = None,
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
    from edge_spec.fitting.devices import list_devices

    for server in rpc or ():
        Endpoint.parse(server)
    found = list_devices(rpc or ())
    if json:
        print_json({"devices": [asdict(device) for device in found]})
        return
    print_table(map(_row, found), ("runtime", "device", "kind", "memory", "description"))


def _show_placements(path: Path, json: bool) -> None:
    from edge_spec.fitting.devices import placements_of
    from edge_spec.models.bundle import open_bundle

    found = placements_of(open_bundle(path))
    if json:
        print_json({"placements": [asdict(each) for each in found]})
        return
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
    print_table((("", cells) for cells in rows), columns)


def _row(device: Device) -> tuple[str, tuple[str, ...]]:
    """Its style and its cells."""
    said = (device.description, device.kernels, device.fault, device.hint)
    about = ": ".join(part for part in said if part)
    cells = (device.runtime, device.name or "-", device.kind or "-", _memory(device), about)
    return "red" if device.fault else "", cells


def _memory(device: Device) -> str:
    from edge_spec.fitting.devices import format_bytes

    if device.free_bytes is None and device.total_bytes is None:
        return "-"
    free, total = (
        "?" if size is None else format_bytes(size)
        for size in (device.free_bytes, device.total_bytes)
    )
    return f"{free} free of {total}"
