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
    draft: options.Draft = "none",
    draft_runtime: options.DraftRuntime = "auto",
    draft_device: options.DraftDevice = None,
    draft_n_max: options.DraftMax = None,
    corpus: options.Corpus = None,
    lookahead: options.Lookahead = None,
    jacobi: options.Jacobi = None,
    exact: options.Exact = False,
    device: options.Device = None,
    threads: options.Threads = None,
    context: options.Context = None,
    gpu_layers: options.GpuLayers = None,
    kv_type: options.KvType = None,
    mmap: options.Mmap = None,
    flash_attention: options.FlashAttention = None,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Answer one prompt."""
    from edge_spec.cli.opening import open_engine
    from edge_spec.sampling import SamplingParams

    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    sampling = SamplingParams(temperature, top_k, top_p, min_p, seed=seed)
    engine = open_engine(
        model,
        runtime=runtime,
        drafter=drafter,
        draft=draft,
        draft_runtime=draft_runtime,
        draft_device=draft_device,
        draft_n_max=draft_n_max,
        corpus=corpus,
        lookahead=lookahead,
        jacobi=jacobi,
        exact=exact,
        device=device,
        threads=threads,
        context=context,
        gpu_layers=gpu_layers,
        kv_type=kv_type,
        mmap=mmap,
        flash_attention=flash_attention,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with engine:
        start = engine.generate if raw else engine.chat
        _print(
            start(text, max_tokens=max_tokens, stop=stop or (), sampling=sampling, stream=True),
            json,
        )


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
