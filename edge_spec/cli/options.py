"""Options that several commands share. No heavy import: every `--help` passes through here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_spec.drafters.fill import Fill

_LOADING = "Model and drafting"
_LLAMACPP = "llama.cpp"
_SAMPLING = "Sampling"

# Small models repeat themselves; an answer without a limit may fill the whole context.
DEFAULT_MAX_TOKENS = 512

MODEL_HELP = "A GGUF file, a Hugging Face directory, a bundle directory, or smollm2."

Runtime = Annotated[
    str,
    typer.Option(
        help="auto, or an installed runtime: ort, llamacpp, ik, reference.",
        rich_help_panel=_LOADING,
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        help="auto, none, or names joined by commas: suffix, recycling, lookahead, jacobi, "
        "corpus, ngram-cache, draft-model.",
        rich_help_panel=_LOADING,
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option("--draft-n-max", help="Most tokens guessed a round.", rich_help_panel=_LOADING),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        help="Texts that answers may quote: a file or directory; may be repeated.",
        rich_help_panel=_LOADING,
    ),
]
Lookahead = Annotated[
    str | None,
    typer.Option(
        metavar="W,N,G",
        help="Columns, n-gram length and guesses of the lookahead window.",
        rich_help_panel=_LOADING,
    ),
]
Jacobi = Annotated[
    Fill | None,
    typer.Option(help="How Jacobi's first guesses are made.", rich_help_panel=_LOADING),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Bit-identical to plain decoding even where the default is not; may be slower.",
        rich_help_panel=_LOADING,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where the model runs, such as cpu or cuda; several joined by commas.",
        rich_help_panel=_LOADING,
    ),
]
Draft = Annotated[
    str,
    typer.Option(help="A smaller model that guesses, or none.", rich_help_panel=_LOADING),
]
DraftRuntime = Annotated[str, typer.Option(help="The draft's runtime.", rich_help_panel=_LOADING)]
DraftDevice = Annotated[
    str | None, typer.Option(help="Where the draft runs.", rich_help_panel=_LOADING)
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads of the model.", rich_help_panel=_LOADING)
]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens of context, if not the model's own.", rich_help_panel=_LOADING),
]
GpuLayers = Annotated[
    int | None,
    typer.Option(help="Layers that leave the CPU.", rich_help_panel=_LLAMACPP),
]
KvType = Annotated[
    str | None,
    typer.Option(
        "--kv-type", help="Of the cache: f16, f32, q8_0, q4_0.", rich_help_panel=_LLAMACPP
    ),
]
Mmap = Annotated[
    bool | None,
    typer.Option(help="Leave the weights in their file.", rich_help_panel=_LLAMACPP),
]
FlashAttention = Annotated[
    bool | None,
    typer.Option(help="On unless turned off.", rich_help_panel=_LLAMACPP),
]
MaxTokens = Annotated[
    int, typer.Option(help="Most tokens of an answer.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="0 keeps all tokens.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="1 keeps all tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="0 keeps all tokens.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Of the random draws.", rich_help_panel=_SAMPLING)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
