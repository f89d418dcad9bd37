"""`edge-spec distill MODEL`: trains a drafter on what the model itself writes."""

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
    use = f"use it with --draft {found.path}"
    if request.out is None and found.report["pays"]:
        use = "the model drafts with it from now on; --draft none leaves it out"
    print(f"Written to {found.path}: {use}")
