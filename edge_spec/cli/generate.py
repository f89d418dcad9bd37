"""`edge-spec generate [MODEL] PROMPT`: one answer."""

from __future__ import annotations

import sys
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec.generation import Generation


@options.with_groups
def generate(
    model: Annotated[
        str | None, typer.Argument(help=f"{options.MODEL_HELP}  [default: smollm2]")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(help="A single argument is the prompt; - reads it from stdin."),
    ] = None,
    raw: Annotated[
        bool, typer.Option(help="Continue the text instead of answering it as a chat message.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    *,
    loading: options.ModelOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Answer one prompt."""
    from edge_spec.cli.opening import open_engine, sampling_params

    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    params = sampling_params(sampling)
    engine = open_engine(model, loading)
    text = sys.stdin.read() if prompt == "-" else prompt
    with engine:
        start = engine.generate if raw else engine.chat
        generation = start(
            text, max_tokens=sampling.max_tokens, stop=stop or (), sampling=params, stream=True
        )
        _print(generation, json)


def _print(generation: Generation, as_json: bool) -> None:
    """Raises KeyboardInterrupt after what there is of an interrupted answer."""
    with generation.cancelled_by_interrupt():
        for chunk in generation:
            if not as_json:
                print(chunk.text, end="", flush=True)
    if as_json:
        print(dumps(generation.result.to_dict(), ensure_ascii=False))
    else:
        print()
    if generation.result.finish_reason == "cancelled":
        raise KeyboardInterrupt
