"""`edge-spec generate [MODEL] PROMPT`: one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edge_spec.cli import options
from edge_spec.errors import UsageError


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
    runtime: options.Runtime = "auto",
    drafter: options.Drafter = "auto",
    draft_n_max: options.DraftMax = None,
    exact: options.Exact = False,
    device: options.Device = None,
    threads: options.Threads = None,
    context: options.Context = None,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Answer one prompt."""
    from edge_spec.cli.progress import ProgressBar
    from edge_spec.loading import LoadOptions, load_engine
    from edge_spec.sampling import SamplingParams

    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    sampling = SamplingParams(temperature, top_k, top_p, min_p, seed=seed)
    load_options = LoadOptions(
        runtime=runtime,
        drafter=drafter,
        draft_n_max=draft_n_max,
        exact=exact,
        threads=threads,
        providers=(device,) if device else (),
        context_length=context,
    )
    if prompt == "-":
        prompt = sys.stdin.read()
    with ProgressBar() as progress:
        engine = load_engine(model, load_options, progress)
    with engine:
        start = engine.generate if raw else engine.chat
        generation = start(
            prompt, max_tokens=max_tokens, stop=stop or (), sampling=sampling, stream=True
        )
        with generation.cancelled_by_interrupt():
            for chunk in generation:
                if not json:
                    print(chunk.text, end="", flush=True)
        if json:
            from json import dumps

            print(dumps(generation.result.to_dict(), ensure_ascii=False))
        else:
            print()
    if generation.result.finish_reason == "cancelled":
        raise KeyboardInterrupt
