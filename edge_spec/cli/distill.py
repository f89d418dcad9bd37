"""`edge-spec distill MODEL --out DRAFT`: trains a drafter on what the model itself writes."""

from __future__ import annotations

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json
from edge_spec.distill.request import DistillRequest


@options.with_groups
def distill(
    model: options.NamedModel,
    *,
    request: DistillRequest,
    loading: options.AskedOptions,
    json: options.Json = False,
) -> None:
    """Train a drafter for a model on what the model itself writes, on this machine.

    Ended early, the same command goes on where it stopped.
    """
    from edge_spec.distill.run import distill
    from edge_spec.distill.training_report import summary

    with ProgressBar() as progress:
        found = distill(model, loading, request, progress)
    if json:
        print_json({"path": str(found.path), **found.report})
        return
    for line in summary(found.report):
        print(line)
    print(f"Written to {found.path}: use it with --draft {found.path}")
