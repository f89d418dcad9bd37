"""`edge-spec chat [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_spec.cli import options


@options.with_groups
def chat(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    loading: options.ModelOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer."""
    from edge_spec import plugins
    from edge_spec.cli.opening import open_engine, sampling_params

    params = sampling_params(sampling)
    with open_engine(model, loading, measure_when_idle=True) as engine:
        plugins.load_app("chat")(engine, params, sampling.max_tokens, system, json)
