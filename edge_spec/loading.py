"""Composes an engine from a model's name: fetch, convert once, open, choose drafters."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec import plugins
from edge_spec.architecture import ModelConfig
from edge_spec.bundle import Bundle, is_bundle, open_bundle
from edge_spec.control.exact import ExactPolicy
from edge_spec.control.numerics import EXACT_WIDTHS, Numerics, measure_numerics
from edge_spec.control.policy import DEFAULT_DRAFT_TOKENS, FixedPolicy, Policy
from edge_spec.drafters.draft_model import Draft
from edge_spec.engine import Engine, Parts, TextFormat
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.model import (
    ExportOptions,
    Model,
    Progress,
    Published,
    Runtime,
    RuntimeOptions,
    TokenizingRuntime,
)
from edge_spec.sources import Source
from edge_spec.tokenizer import TextCodec, Tokenizer
from edge_spec.vocabulary import require_same_vocabulary


@dataclass(frozen=True)
class LoadOptions:
    """What `load` composes; "auto" leaves the choice to edge-spec."""

    runtime: str = "auto"
    drafter: str = "auto"  # "auto", "none", or names joined by commas
    draft: str = "none"  # a smaller model that guesses, named like the target
    draft_runtime: str = "auto"
    draft_providers: tuple[str, ...] = ()
    draft_n_max: int | None = None  # guessed tokens a round; None: the policy's default
    quantization: str | None = None  # of a model that has to be converted
    block_size: int | None = None
    exact: bool = False  # bit-identical to plain decoding in the same mode
    threads: int | None = None
    providers: tuple[str, ...] = ()
    context_length: int | None = None  # tokens; None: what the model was trained for
    gpu_layers: int | None = None  # of the target, as the three below
    kv_type: str | None = None
    mmap: bool | None = None
    flash_attention: bool | None = None

    def __post_init__(self) -> None:
        if self.draft_n_max is not None and self.draft_n_max < 1:
            raise UsageError(
                f"the largest number of draft tokens is {self.draft_n_max}",
                remedy="It has to be 1 or more; --drafter none turns drafting off.",
            )
        for name, value in (("threads", self.threads), ("context", self.context_length)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", remedy="It has to be 1 or more.")
        names = [name.strip() for name in self.drafter.split(",")]
        if self.draft != "none" and names != ["auto"] and plugins.DRAFT_MODEL not in names:
            raise UsageError(
                f"the draft {self.draft} would not be used by --drafter {self.drafter}",
                remedy=f"Add {plugins.DRAFT_MODEL} to --drafter, or leave --draft out.",
            )
        if self.draft == "none" and plugins.DRAFT_MODEL in names:
            raise UsageError(
                f"the drafter {plugins.DRAFT_MODEL} needs a second model",
                remedy="Name it with --draft MODEL.",
            )
        if self.gpu_layers is not None and self.gpu_layers < 0:
            raise UsageError(f"gpu-layers is {self.gpu_layers}", remedy="It has to be 0 or more.")

    @property
    def runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(
            self.threads,
            self.providers,
            self.context_length,
            self.gpu_layers,
            self.kv_type,
            self.mmap,
            self.flash_attention,
        )

    @property
    def draft_runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(self.threads, self.draft_providers)


def load(
    model: str = "smollm2",
    *,
    runtime: str = "auto",
    drafter: str = "auto",
    draft: str = "none",
    draft_runtime: str = "auto",
    draft_n_max: int | None = None,
    exact: bool = False,
    threads: int | None = None,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Opens a model for `chat` and `generate`; the first use of one converts it into the cache.

    model: a GGUF file, a Hugging Face directory, a bundle directory or "smollm2".
    drafter: "auto", "none", or names joined by commas.
    draft: a smaller model with the same vocabulary that guesses, on a runtime of its own.
    exact: speculative text is bit-identical to plain text of this mode, whose steps are padded
    where the runtime needs it.
    Raises an EdgeSpecError that names what is missing or wrong.
    """
    options = LoadOptions(
        runtime=runtime,
        drafter=drafter,
        draft=draft,
        draft_runtime=draft_runtime,
        draft_n_max=draft_n_max,
        exact=exact,
        threads=threads,
        context_length=context_length,
    )
    return load_engine(model, options, progress or (lambda what, fraction: None))


def load_engine(model: str, options: LoadOptions, progress: Progress) -> Engine:
    """Raises an EdgeSpecError that names what is missing or wrong."""
    with ExitStack() as opened:  # closes what is open already where the rest fails
        target = _prepare(Source(model, progress), options.runtime, options, progress)
        draft = None
        if options.draft != "none":
            draft = _open_draft(target, options, progress)
            opened.callback(draft.close)
        drafters = plugins.load_drafters(options.drafter, draft.make_drafter if draft else None)
        loaded = target.open(options.runtime_options)
        opened.callback(loaded.close)
        check_capabilities(target.name, target.runtime.name, loaded, options)
        policy, numerics, min_rows = _policy(loaded, options)
        engine = Engine(
            Parts(
                target.name,
                target.runtime.name,
                loaded,
                target.text,
                drafters,
                policy,
                numerics,
                min_rows,
                draft,
            )
        )
        opened.pop_all()
    return engine


@dataclass(frozen=True)
class _Prepared:
    """A model that is ready to be opened: what it is is known, its weights are not read yet."""

    name: str
    runtime: Runtime
    source: Any  # what the runtime's `open` takes
    config: ModelConfig
    text: TextFormat

    def open(self, options: RuntimeOptions) -> Model:
        return self.runtime.open(self.source, options)


def _prepare(source: Source, runtime: str, options: LoadOptions, progress: Progress) -> _Prepared:
    chosen = plugins.load_runtime(runtime)
    if chosen.reads == "checkpoint":
        published: Published = plugins.open_checkpoint(source.path)
    elif chosen.reads == "gguf":
        published = plugins.open_published(_gguf_file(source, options, progress))
    else:
        bundle = _bundle(source, chosen.reads, options, progress)
        text = _text_of_bundle(bundle)
        return _Prepared(source.name, chosen, bundle, bundle.config, text)
    text = _text_of_published(published, chosen)
    return _Prepared(source.name, chosen, published, published.config, text)


def _open_draft(target: _Prepared, options: LoadOptions, progress: Progress) -> Draft:
    """Compares the vocabularies before any weights are read."""
    source = Source(options.draft, progress)
    draft = _prepare(source, options.draft_runtime, options, progress)
    require_same_vocabulary(
        target.text.tokenizer.vocabulary(),
        draft.text.tokenizer.vocabulary(),
        target.name,
        draft.name,
    )
    return Draft(draft.open(options.draft_runtime_options), target.config.vocab_size)


def check_capabilities(name: str, runtime: str, model: Model, options: LoadOptions) -> None:
    """What the model cannot do is refused here, never in the middle of a text.

    Raises UsageError, UnsupportedModelError.
    """
    max_rows = model.capabilities.max_rows
    if options.draft_n_max is not None and options.draft_n_max >= max_rows:
        raise UsageError(
            f"{options.draft_n_max} draft tokens a round are too many",
            remedy=f"{runtime} takes at most {max_rows - 1}.",
        )
    if not model.capabilities.rollback:
        raise UnsupportedModelError(
            f"{name} on {runtime} cannot rewind its cache, which speculation and chat need",
            remedy="Use another runtime or model.",
        )


def _policy(model: Model, options: LoadOptions) -> tuple[Policy, Numerics, int]:
    """The policy, what it was measured on, and the rows of its narrowest pass."""
    fixed = FixedPolicy(options.draft_n_max or DEFAULT_DRAFT_TOKENS, trees=model.capabilities.trees)
    if not options.exact:
        return fixed, measure_numerics(model), 1
    numerics = measure_numerics(model, EXACT_WIDTHS)
    widths = numerics.invariant_widths
    return ExactPolicy(fixed, widths), numerics, widths[0]


def _gguf_file(source: Source, options: LoadOptions, progress: Progress) -> Path:
    """A GGUF file as it is; anything else, or with another quantization, converted once."""
    if not source.is_demo and is_bundle(source.path):
        raise UsageError(
            f"{source.path} is a bundle, not a GGUF file",
            remedy="Choose another --runtime, or give the model that the bundle was made from.",
        )
    if source.path.is_file() and options.quantization is None:
        return source.path
    export_options = ExportOptions(options.quantization, options.block_size)
    cached = source.cached("gguf", export_options).with_suffix(".gguf")
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = plugins.open_checkpoint(source.path)
        plugins.load_exporter("gguf").export(checkpoint, cached, export_options, progress)
    return cached


def _bundle(source: Source, format: str, options: LoadOptions, progress: Progress) -> Bundle:
    if not source.is_demo and is_bundle(source.path):
        bundle = open_bundle(source.path)
        if bundle.manifest.format != format:
            raise UsageError(
                f"{source.path} is an {bundle.manifest.format} bundle",
                remedy=f"The chosen runtime reads {format}; choose another with --runtime.",
            )
        return bundle
    export_options = ExportOptions(options.quantization, options.block_size)
    cached = source.cached(format, export_options)
    if not is_bundle(cached):
        exporter = plugins.load_exporter(format)
        checkpoint = plugins.open_checkpoint(source.path)
        exporter.export(checkpoint, cached, export_options, progress)
    return open_bundle(cached)


def _text_of_bundle(bundle: Bundle) -> TextFormat:
    manifest = bundle.manifest
    json = bundle.file("tokenizer.json").read_text(encoding="utf-8")
    return TextFormat(
        tokenizer=Tokenizer(json, manifest.bos_id if manifest.adds_bos else None),
        chat_template=manifest.chat_template,
        eos_ids=manifest.eos_ids,
        bos_id=manifest.bos_id,
    )


def _text_of_published(published: Published, runtime: Runtime) -> TextFormat:
    try:
        json = published.tokenizer_json()
        tokenizer: TextCodec = Tokenizer(json, published.bos_id if published.adds_bos else None)
    except UnsupportedModelError:
        if not isinstance(runtime, TokenizingRuntime):
            raise
        tokenizer = runtime.open_tokenizer(published)
    return TextFormat(
        tokenizer=tokenizer,
        chat_template=published.chat_template,
        eos_ids=published.eos_ids,
        bos_id=published.bos_id,
    )
