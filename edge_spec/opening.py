"""`edge_spec.load`: from a model's name and what a user chooses to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_spec.core.model import Progress
from edge_spec.drafters.jacobi.jacobi_init import JacobiInit
from edge_spec.drafters.jacobi.lookahead import WindowSize
from edge_spec.engine.async_engine import awaited
from edge_spec.engine.engine import Engine
from edge_spec.loader import load_engine
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.options import LoadOptions, device_names
from edge_spec.models.source import Source


def load(
    model: str = "smollm2",
    *,
    runtime: str = "auto",
    drafter: str = "auto",
    draft: str | Sequence[str] | None = None,
    draft_runtime: str = "auto",
    device: str | None = None,
    draft_device: str | None = None,
    draft_n_max: int | None = None,
    exit_layer: int | None = None,
    corpora: Sequence[str | Path] = (),
    lookahead: str | None = None,
    jacobi: str | None = None,
    exact: bool = False,
    parallel_rows: int | None = None,
    call_timeout_s: float | None = None,
    threads: int | None = None,
    context_length: int | None = None,
    plan: str | Path | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Opens a model for `chat` and `generate`; the first use of one converts it into the cache.

    model: a GGUF file, a Hugging Face directory, a bundle directory, a pair bundle, "smollm2", or
    "hf:org/name", "hf:org/name@revision", "hf:org/name:file.gguf", which the Hugging Face hub has:
    fetched on first use, later opened from the cache without asking.
    drafter: "auto", "none", or names joined by commas.
    draft: a smaller model that drafts, on a runtime of its own; of several, each other one
    drafts for the one before it. None: what a pair bundle brings along; "none": no draft; "auto":
    the smallest model in the caches that has the same tokens and at most half the size.
    device, draft_device: where they run, names of `edge-spec devices` joined by commas.
    exit_layer: where early exit ends; searched on the text where it is not given.
    corpora: texts, files or directories, that answers may quote; indexed once.
    lookahead: "W,N,G", the size of its window. jacobi: "random", "repeat-last" or "ngram".
    exact: speculative text is bit-identical to plain text of this mode, whose steps are padded
    where the runtime needs it.
    parallel_rows: that all conversations on this model (`Engine.fork`) may score together, a pass.
    call_timeout_s: an answer ends with an error where a pass of the model takes longer; the next
    one works. `early-exit` and `layer-skip` are not to be had with it.
    plan: a file of `edge-spec plan`; without one, the plan that the cache holds for this model
    decides what is left to "auto". A model that has no profile is measured while it is idle.
    Raises an EdgeSpecError that names what is missing or wrong.
    """
    say = progress or (lambda what, fraction: None)
    named = [draft] if isinstance(draft, str) else draft
    options = LoadOptions(
        runtime=runtime,
        drafter=drafter,
        drafts=chosen_drafts(
            Source(model, say),
            named,
            drafter,
            is_planned=plan is not None,
            draft_runtime=draft_runtime,
        ),
        draft_runtime=draft_runtime,
        providers=device_names(device),
        draft_providers=device_names(draft_device),
        draft_n_max=draft_n_max,
        exit_layer=exit_layer,
        corpora=tuple(Path(path) for path in corpora),
        window=None if lookahead is None else WindowSize.parse(lookahead),
        fill=None if jacobi is None else JacobiInit.parse(jacobi),
        exact=exact,
        parallel_rows=parallel_rows,
        call_timeout_s=call_timeout_s,
        threads=threads,
        context_length=context_length,
        plan=None if plan is None else Path(plan),
    )
    return load_engine(model, options, say, measure_when_idle=True)


load_async = awaited(load)
load_async.__name__ = load_async.__qualname__ = "load_async"
