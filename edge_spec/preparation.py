"""From a model's name to what a runtime opens: fetched, converted once, described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec import plugins
from edge_spec.architecture import ModelConfig
from edge_spec.bundle import Bundle, is_bundle, open_bundle
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.load_options import LoadOptions
from edge_spec.model import (
    ExportOptions,
    Model,
    Progress,
    Published,
    Runtime,
    RuntimeOptions,
    TokenizingRuntime,
)
from edge_spec.parts import TextFormat
from edge_spec.sources import Source
from edge_spec.tokenizer import TextCodec, Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be opened: what it is is known, its weights are not read yet."""

    name: str
    runtime: Runtime
    source: Any  # what the runtime's `open` takes
    config: ModelConfig
    text: TextFormat

    def vocabulary(self) -> Mapping[str, int]:
        """Token -> id."""
        return self.text.tokenizer.vocabulary()

    def open(self, options: RuntimeOptions) -> Model:
        return self.runtime.open(self.source, options)


def prepare(source: Source, runtime: str, options: LoadOptions, progress: Progress) -> Prepared:
    chosen = plugins.load_runtime(runtime)
    if chosen.reads == "checkpoint":
        published: Published = plugins.open_checkpoint(source.path)
    elif chosen.reads == "gguf":
        published = plugins.open_published(gguf_file(source, options, progress))
    else:
        bundle = _bundle(source, chosen.reads, options, progress)
        text = _text_of_bundle(bundle)
        return Prepared(source.name, chosen, bundle, bundle.config, text)
    text = _text_of_published(published, chosen)
    return Prepared(source.name, chosen, published, published.config, text)


def is_prepared(source: Source, runtime: str, options: LoadOptions) -> bool:
    """Whether `prepare` has nothing to convert."""
    reads = plugins.load_runtime(runtime).reads
    if reads == "checkpoint" or (not source.is_demo and is_bundle(source.path)):
        return True
    export_options = ExportOptions(options.quantization, options.block_size)
    if reads == "gguf":
        as_it_is = source.path.is_file() and options.quantization is None
        return as_it_is or source.cached(reads, export_options).with_suffix(".gguf").is_file()
    return is_bundle(source.cached(reads, export_options))


def gguf_file(source: Source, options: LoadOptions, progress: Progress) -> Path:
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
        exporter, model = plugins.exporter_for(format, source.path)
        exporter.export(model, cached, export_options, progress)
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
