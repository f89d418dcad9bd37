"""`edge-spec chat [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_spec.cli import options


def chat(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
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
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer."""
    from edge_spec import plugins
    from edge_spec.cli.opening import open_engine
    from edge_spec.sampling import SamplingParams

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
    with engine:
        plugins.load_app("chat")(engine, sampling, max_tokens, system, json)
