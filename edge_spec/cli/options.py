"""Options that several commands share. No heavy import: every `--help` passes through here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from edge_spec.control.overlap import DraftOverlap
from edge_spec.drafters.jacobi.jacobi_init import JacobiInit

_LOADING = "Model and drafting"
_LLAMACPP = "llama.cpp"
_SAMPLING = "Sampling"

ENDPOINT = "HOST:PORT"
RPC_HELP = "A server of llama.cpp whose devices are used, too; may be repeated."
MODEL_HELP = (
    "A GGUF file, a Hugging Face directory, a bundle or pair bundle, hf:org/name[:file], or "
    "smollm2."
)


def _option(panel: str, help: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened and who drafts for it."""

    runtime: Annotated[
        str,
        _option(_LOADING, "auto, or an installed runtime: ort, llamacpp, ik, coreml, reference."),
    ] = "auto"
    drafter: Annotated[
        str,
        _option(
            _LOADING,
            "auto, none, or names joined by commas: suffix, recycling, lookahead, jacobi, corpus, "
            "ngram-cache, draft-model, cascade, early-exit, layer-skip.",
        ),
    ] = "auto"
    draft: Annotated[
        list[str] | None,
        _option(
            _LOADING,
            "A smaller model that drafts, none, or auto: one that fits and is here; may be "
            "repeated: each one more drafts for the one before.  [default: a pair bundle's own]",
        ),
    ] = None
    draft_runtime: Annotated[str, _option(_LOADING, "The draft's runtime.")] = "auto"
    draft_device: Annotated[str | None, _option(_LOADING, "Where the draft runs.")] = None
    draft_threads: Annotated[
        int | None, _option(_LOADING, "CPU threads of the draft, if not the model's.")
    ] = None
    draft_overlap: Annotated[
        DraftOverlap,
        _option(_LOADING, "Draft while the model verifies: auto where devices differ."),
    ] = DraftOverlap.AUTO
    draft_n_max: Annotated[
        int | None, _option(_LOADING, "Most tokens drafted a round.", "--draft-n-max")
    ] = None
    exit_layer: Annotated[
        int | None, _option(_LOADING, "Layers that early exit keeps.", "--exit-layer")
    ] = None
    corpus: Annotated[
        list[Path] | None,
        _option(_LOADING, "Texts that answers may quote: a file or directory; may be repeated."),
    ] = None
    lookahead: Annotated[
        str | None,
        _option(
            _LOADING,
            "Columns, n-gram length and draft tokens of the lookahead window.",
            metavar="W,N,G",
        ),
    ] = None
    jacobi: Annotated[
        JacobiInit | None, _option(_LOADING, "How Jacobi's initial tokens are made.")
    ] = None
    exact: Annotated[
        bool,
        _option(
            _LOADING,
            "Bit-identical to plain decoding even where the default is not; may be slower.",
            "--exact",
        ),
    ] = False
    device: Annotated[
        str | None,
        _option(_LOADING, "Where the model runs: names from edge-spec devices, joined by commas."),
    ] = None
    parallel_rows: Annotated[
        int | None,
        _option(_LOADING, "Most rows that all conversations together score, a pass."),
    ] = None
    call_timeout: Annotated[
        float | None,
        _option(_LOADING, "Seconds that a pass of the model may take before it is given up."),
    ] = None
    threads: Annotated[int | None, _option(_LOADING, "CPU threads of the model.")] = None
    plan: Annotated[
        Path | None, _option(_LOADING, "A file of edge-spec plan: where models run, who drafts.")
    ] = None
    context: Annotated[
        int | None, _option(_LOADING, "Tokens of context, if not the model's own.")
    ] = None
    gpu_layers: Annotated[int | None, _option(_LLAMACPP, "Layers that leave the CPU.")] = None
    kv_type: Annotated[
        str | None, _option(_LLAMACPP, "Of the cache: f16, f32, q8_0, q4_0.", "--kv-type")
    ] = None
    mmap: Annotated[bool | None, _option(_LLAMACPP, "Leave the weights in their file.")] = None
    flash_attention: Annotated[bool | None, _option(_LLAMACPP, "On unless turned off.")] = None
    rpc: Annotated[list[str] | None, _option(_LLAMACPP, RPC_HELP, metavar=ENDPOINT)] = None


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, and how long an answer may be."""

    # Small models repeat themselves; an answer without a limit may fill the whole context.
    max_tokens: Annotated[int, _option(_SAMPLING, "Most tokens of an answer.")] = 512
    temperature: Annotated[float, _option(_SAMPLING, "0 takes the likeliest token.")] = 0.0
    top_k: Annotated[int, _option(_SAMPLING, "0 keeps all tokens.")] = 0
    top_p: Annotated[float, _option(_SAMPLING, "1 keeps all tokens.")] = 1.0
    min_p: Annotated[float, _option(_SAMPLING, "0 keeps all tokens.")] = 0.0
    seed: Annotated[int | None, _option(_SAMPLING, "Of the random draws.")] = None


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """For each parameter of a command that is one of the classes above: the command gets the
    class's fields as options, and an instance of it."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in hints if hints[name] in (ModelOptions, SamplingOptions)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        of_fields = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=of_fields[field.name],
            )
            for field in fields(groups[name])
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    # What typer reads; `wraps` copied the command's own.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
