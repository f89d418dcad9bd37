"""`edge-spec chat [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options

if TYPE_CHECKING:
    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine


@options.with_groups
def chat(
    model: options.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    learn: options.Learn = False,
    *,
    loading: options.AskedOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer."""
    from edge_spec.cli.opening import open_engine
    from edge_spec.core import entry_points
    from edge_spec.text.thoughts import read_reasoning

    def opener(model: str, *, exact: bool, report: Progress | None) -> Engine:
        return open_engine(
            model,
            replace(loading, exact=exact),
            measure_when_idle=True,
            report=report,
            needs_chat=True,
            learns=learn,
        )

    sampling.params()  # refused now rather than when the model is open
    answering = {
        "max_tokens": sampling.max_tokens,
        "reasoning": read_reasoning(sampling.reasoning),
    }
    entry_points.load_app("chat")(
        opener, model, loading.exact, answering, system, json, asked_sampling=sampling.asked
    )
