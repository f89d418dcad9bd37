"""`edge-spec distill MODEL --out DRAFT`: trains a drafter on what the model itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_spec.cli import options

_BYTES = 1_000_000  # of a MB


@options.with_groups
def distill(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP, show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory of the drafter.", show_default=False)],
    kind: Annotated[str, typer.Option(help="medusa, eagle3 or draft.")] = "medusa",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="What the model answers: JSON lines with id, category, and prompt or turns, or a "
            ".txt with a prompt a line; without it, what the model asks itself."
        ),
    ] = None,
    domain: Annotated[
        Path | None,
        typer.Option(help="A text, or a directory of texts, which the model is asked about."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of answers to learn from.")] = 300_000,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    vocabulary: Annotated[
        int, typer.Option(help="Tokens that the drafter scores: those the model writes most.")
    ] = 4096,
    positions: Annotated[
        int, typer.Option(help="Draft tokens of a round that it is trained for.")
    ] = 3,
    epochs: Annotated[
        int | None,
        typer.Option(help="Most passes over the answers.  [default: medusa 8, eagle3 and draft 6]"),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Of an ordinary draft.  [default: one for seven of the model's]"),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray cluster: its machines write answers and read features.",
            metavar="ADDRESS",
        ),
    ] = None,
    max_cache: Annotated[
        int, typer.Option(help="MB on the disk for what the model computes of the answers.")
    ] = 4000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    *,
    loading: options.AskedOptions,
    json: options.Json = False,
) -> None:
    """Train a drafter for a model on what the model itself writes, on this machine.

    Ended early, the same command goes on where it stopped.
    """
    from json import dumps

    from edge_spec.cli.progress import ProgressBar
    from edge_spec.distill import DistillRequest, distill
    from edge_spec.distill.report import summary

    request = DistillRequest(
        out=out,
        kind=kind,
        prompts=prompts,
        domain=domain,
        num_tokens=tokens,
        max_tokens=max_tokens,
        vocabulary=vocabulary,
        positions=positions,
        epochs=epochs,
        layers=layers,
        ray=ray,
        max_cache_bytes=max_cache * _BYTES,
        seed=seed,
    )
    with ProgressBar() as progress:
        found = distill(model, loading, request, progress)
    if json:
        print(dumps({"path": str(found.path), **found.report}))
        return
    for line in summary(found.report):
        print(line)
    print(f"Written to {found.path}: use it with --draft {found.path}")
