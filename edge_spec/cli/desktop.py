"""`edge-spec desktop [MODEL]`: the web page in a window of its own."""

from __future__ import annotations

import sys
from functools import partial

from edge_spec.cli import options

_PARALLEL = 2  # answers at once: one that is read, and one that is asked for meanwhile


@options.with_groups
def desktop(
    model: options.Model = "smollm2",
    learn: options.Learn = False,
    *,
    loading: options.AskedOptions,
    sampling: options.ChatSamplingOptions,
) -> None:
    """Talk to a model in a window, whose closing ends everything. Sampling options and --max-tokens
    hold for what the page does not set."""
    from edge_spec.cli.opening import open_engine
    from edge_spec.cli.serve import plan_document
    from edge_spec.core import entry_points
    from edge_spec.core.sampling import SamplingParams

    entry_points.load_app("desktop")(
        partial(open_engine, model, loading, measure_when_idle=True, needs_chat=True, learns=learn),
        _announce,
        title=model,
        plan=lambda: plan_document(model, loading) or {"candidates": []},
        parallel=_PARALLEL,
        max_tokens=sampling.max_tokens,
        sampling=SamplingParams(**sampling.asked),
        asked_sampling=sampling.asked,
    )


def _announce(model: str, url: str, port: int) -> None:
    print(f"{model} is in the window, served on {url}.", file=sys.stderr, flush=True)
