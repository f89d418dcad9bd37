"""Composes an engine from a model's name: fetch, convert once, open, choose drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec import plugins
from edge_spec.bundle import Bundle, is_bundle, open_bundle
from edge_spec.control.exact import ExactPolicy
from edge_spec.control.numerics import EXACT_WIDTHS, measure_numerics
from edge_spec.control.policy import DEFAULT_DRAFT_TOKENS, FixedPolicy, Policy
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine import Engine, Parts, TextFormat
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.model import Checkpoint, ExportOptions, Model, Progress, RuntimeOptions
from edge_spec.sources import Source
from edge_spec.tokenizer import Tokenizer

AUTO_RUNTIME = "ort"


@dataclass(frozen=True)
class LoadOptions:
    """What `load` composes; "auto" leaves the choice to edge-spec."""

    runtime: str = "auto"
    drafter: str = "auto"  # "auto", "none", or names joined by commas
    draft_n_max: int | None = None  # guessed tokens a round; None: the policy's default
    quantization: str | None = None  # of a model that has to be converted
    block_size: int | None = None
    exact: bool = False  # bit-identical to plain decoding in the same mode
    threads: int | None = None
    providers: tuple[str, ...] = ()
    context_length: int | None = None  # tokens; None: what the model was trained for

    def __post_init__(self) -> None:
        if self.draft_n_max is not None and self.draft_n_max < 1:
            raise UsageError(
                f"the largest number of draft tokens is {self.draft_n_max}",
                remedy="It has to be 1 or more; --drafter none turns drafting off.",
            )
        for name, value in (("threads", self.threads), ("context", self.context_length)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", remedy="It has to be 1 or more.")

    @property
    def runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(self.threads, self.providers, self.context_length)


def load(
    model: str = "smollm2",
    *,
    runtime: str = "auto",
    drafter: str = "auto",
    draft_n_max: int | None = None,
    exact: bool = False,
    threads: int | None = None,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Opens a model for `chat` and `generate`; the first use of one converts it into the cache.

    model: a GGUF file, a Hugging Face directory, a bundle directory or "smollm2".
    drafter: "auto", "none", or names joined by commas.
    exact: speculative text is bit-identical to plain text of this mode, whose steps are padded
    where the runtime needs it.
    Raises an EdgeSpecError that names what is missing or wrong.
    """
    options = LoadOptions(
        runtime=runtime,
        drafter=drafter,
        draft_n_max=draft_n_max,
        exact=exact,
        threads=threads,
        context_length=context_length,
    )
    return load_engine(model, options, progress or (lambda what, fraction: None))


def load_engine(model: str, options: LoadOptions, progress: Progress) -> Engine:
    """Raises an EdgeSpecError that names what is missing or wrong."""
    source = Source(model, progress)
    drafters = plugins.load_drafters(options.drafter)
    runtime = plugins.load_runtime(AUTO_RUNTIME if options.runtime == "auto" else options.runtime)
    if runtime.reads == "checkpoint":
        checkpoint = plugins.open_checkpoint(source.path)
        opened = runtime.open(checkpoint, options.runtime_options)
        text = _text_of_checkpoint(checkpoint)
    else:
        bundle = _bundle(source, runtime.reads, options, progress)
        opened = runtime.open(bundle, options.runtime_options)
        text = _text_of_bundle(bundle)
    return _compose(source.name, runtime.name, opened, text, drafters, options)


def _compose(
    name: str,
    runtime: str,
    model: Model,
    text: TextFormat,
    drafters: Sequence[Drafter],
    options: LoadOptions,
) -> Engine:
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
    policy: Policy = FixedPolicy(
        options.draft_n_max or DEFAULT_DRAFT_TOKENS, trees=model.capabilities.trees
    )
    if not options.exact:
        numerics = measure_numerics(model)
        return Engine(Parts(name, runtime, model, text, drafters, policy, numerics))
    numerics = measure_numerics(model, EXACT_WIDTHS)
    widths = numerics.invariant_widths
    policy = ExactPolicy(policy, widths)
    return Engine(Parts(name, runtime, model, text, drafters, policy, numerics, widths[0]))


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
    cached = source.cached_bundle(format, export_options)
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


def _text_of_checkpoint(checkpoint: Checkpoint) -> TextFormat:
    return TextFormat(
        tokenizer=Tokenizer(
            checkpoint.tokenizer_json(), checkpoint.bos_id if checkpoint.adds_bos else None
        ),
        chat_template=checkpoint.chat_template,
        eos_ids=checkpoint.eos_ids,
        bos_id=checkpoint.bos_id,
    )
