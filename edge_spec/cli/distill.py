"""`edge-spec distill MODEL`: trains a drafter on what the model itself writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

    with ProgressBar() as progress:
        found = distill(model, loading, request, progress)
    if json:
        print_json({"path": str(found.path), **found.report})
        return
    for line in _summary(found.report):
        print(line)
    use = f"use it with --draft {found.path}"
    if request.out is None and found.report["pays"]:
        use = "the model drafts with it from now on; --draft none leaves it out"
    print(f"Written to {found.path}: {use}")


def _summary(report: Mapping[str, Any]) -> list[str]:
    chances = ", ".join(f"{100 * each:.0f} %" for each in report["acceptance"])
    forecast, vocabulary = report["forecast"], report["vocabulary"]
    many = forecast["num_draft_tokens"]
    pays = "" if report["pays"] else ": it does not pay here"
    return [
        f"accepted by position, each after all before it: {chances} "
        f"({report['tokens']['held_out']:,} held-out tokens)",
        f"scores {vocabulary['scored']:,} tokens, {100 * vocabulary['coverage']:.1f} % of what "
        "the model writes",
        f"forecast: {forecast['speedup']:.2f} times plain decoding, with {many} draft "
        f"token{'s' if many > 1 else ''} a round{pays}",
    ]
