"""From the options of a command to an engine, with its progress shown."""

from __future__ import annotations

from dataclasses import replace

from edge_spec.cli.options import ModelOptions, SamplingOptions
from edge_spec.cli.progress import ProgressBar
from edge_spec.core.model import Progress
from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.jacobi.lookahead import WindowSize
from edge_spec.engine.engine import Engine
from edge_spec.loader import load_engine
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.options import LoadOptions, device_names
from edge_spec.models.source import Source


def open_engine(
    model: str,
    options: ModelOptions,
    measure_when_idle: bool = False,
    report: Progress | None = None,
    keeps_ngrams: bool = True,
) -> Engine:
    """report: instead of a bar on stderr. Raises an EdgeSpecError."""
    with ProgressBar() as bar:
        progress = report or bar
        drafts = asked_drafts(Source(model, progress), options)
        loading = replace(_load_options(options, drafts), keeps_ngrams=keeps_ngrams)
        return load_engine(model, loading, progress, measure_when_idle)


def asked_drafts(source: Source, options: ModelOptions) -> tuple[str, ...]:
    """Raises as `chosen_drafts` does."""
    return chosen_drafts(
        source,
        options.draft,
        options.drafter,
        is_planned=options.plan is not None,
        draft_runtime=options.draft_runtime,
    )


def _load_options(options: ModelOptions, drafts: tuple[str, ...]) -> LoadOptions:
    return LoadOptions(
        runtime=options.runtime,
        drafter=options.drafter,
        drafts=drafts,
        draft_runtime=options.draft_runtime,
        draft_providers=device_names(options.draft_device),
        draft_threads=options.draft_threads,
        draft_overlap=options.draft_overlap,
        draft_n_max=options.draft_n_max,
        exit_layer=options.exit_layer,
        corpora=tuple(options.corpus or ()),
        window=None if options.lookahead is None else WindowSize.parse(options.lookahead),
        fill=options.jacobi,
        exact=options.exact,
        providers=device_names(options.device),
        parallel_rows=options.parallel_rows,
        call_timeout_s=options.call_timeout,
        threads=options.threads,
        context_length=options.context,
        gpu_layers=options.gpu_layers,
        kv_type=options.kv_type,
        mmap=options.mmap,
        flash_attention=options.flash_attention,
        rpc_servers=tuple(options.rpc or ()),
        plan=options.plan,
    )


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """Raises UsageError."""
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )
