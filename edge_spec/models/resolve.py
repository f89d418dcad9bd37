"""Resolves a model's name to what a runtime opens: fetched, converted once, described."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, Progress, Runtime, RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.runtime_protocols import DeviceScreeningRuntime, ScreeningRuntime
from edge_spec.errors import ModelFileError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, is_bundle, open_unhashed
from edge_spec.models.conversion import bundle_of, gguf_file, require_format
from edge_spec.models.model_text import text_of_bundle, text_of_info
from edge_spec.models.options import ConversionOptions
from edge_spec.models.runtime_choice import (
    choose_runtime,
    compute_for,
    gguf_in_cache,
    is_converted,
)
from edge_spec.models.source import Source
from edge_spec.text.chat_format import ChatFormat

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedModel:
    """A model that is ready to be opened: what it is is known, its weights are not read yet."""

    name: str
    runtime: Runtime
    source: Any  # what the runtime's `open` takes
    config: ModelConfig
    text: ChatFormat
    profiles: Path | None = None  # that came with it
    as_it_is: bool = False  # whether the runtime reads the very file that was named

    @property
    def loss(self) -> float | None:
        """KL divergence of its weights from those that it was made from, nats a token: about the
        share of perplexity that it loses. None where it is not known."""
        if isinstance(self.source, Bundle):
            return self.source.manifest.parity.get("kl_divergence")
        return 0.0 if self.as_it_is else None

    def vocabulary(self) -> Mapping[str, int]:
        """Token -> id."""
        return self.text.tokenizer.vocabulary()

    def open(self, options: RuntimeOptions) -> Model:
        return self.runtime.open(self.source, options)


def resolve_model(
    source: Source,
    runtime: str,
    options: ConversionOptions,
    progress: Progress,
    providers: Sequence[str] = (),
    before_conversion: Callable[[Any], None] | None = None,
    keeps: bool = True,
    order: Sequence[str] = (),
) -> ResolvedModel:
    """Raises an EdgeSpecError where the runtime cannot have the model.

    runtime: "auto" is the first that can run it, which one line says where it is not the usual one;
    for a pair bundle, the first that reads a format it has.
    providers: where it will run; devices of the options' target are not looked at.
    before_conversion: is shown a model that has to be converted, and may raise.
    keeps: in the cache, a tokenizer that takes long to make.
    order: in which "auto" asks the runtimes, where it is not the usual one.
    """
    choice = choose_runtime(source, runtime, options, providers, order)
    if choice.refusals:
        _log.warning("%s", choice)
    chosen = choice.runtime
    if providers and isinstance(chosen, DeviceScreeningRuntime):
        chosen.require_devices(providers)
    as_it_is = True
    if chosen.reads == "checkpoint":
        published: ModelInfo = runtimes.open_checkpoint(source.at(chosen.reads))
    elif chosen.reads == "gguf":
        file = gguf_file(source, options, progress, before_conversion)
        as_it_is = file == source.at(chosen.reads)
        published = source.header if as_it_is else runtimes.open_model_info(file)
        if choice.info is None and isinstance(chosen, ScreeningRuntime):
            chosen.require_runnable(published)
    else:
        compute = compute_for(chosen, providers)
        export_options = ExportOptions(options.quantization, options.block_size, compute=compute)
        format = runtimes.format_for(chosen, source.formats, providers)
        bundle = bundle_of(source, format, export_options, progress, before_conversion)
        text = text_of_bundle(bundle)
        return ResolvedModel(source.name, chosen, bundle, bundle.config, text, source.profiles)
    text = text_of_info(published, chosen, keeps)
    return ResolvedModel(
        source.name, chosen, published, published.config, text, source.profiles, as_it_is
    )


def find_resolved(
    source: Source,
    runtime: str,
    options: ConversionOptions,
    progress: Progress,
    providers: Sequence[str] = (),
) -> ResolvedModel | None:
    """Resolves as `resolve_model` does, for a look at the model alone: nothing is converted,
    written or hashed.
    None where it would have to be converted, also since a conversion is damaged."""
    chosen = choose_runtime(source, runtime, options, providers).runtime
    if not is_converted(source, chosen.name, options, providers):
        return None
    format = runtimes.format_for(chosen, source.formats, providers)
    path = source.at(format)
    as_it_is = path.is_file() and options.quantization is None
    if chosen.reads == "checkpoint" or (chosen.reads == "gguf" and (as_it_is or is_bundle(path))):
        return resolve_model(source, chosen.name, options, progress, providers, keeps=False)
    if is_bundle(path):
        return _described(source, chosen, path, providers)
    compute = compute_for(chosen, providers)
    export_options = ExportOptions(options.quantization, options.block_size, compute=compute)
    with suppress(ModelFileError):
        if chosen.reads == "gguf":
            return _described(source, chosen, gguf_in_cache(source, export_options))
        return _described(source, chosen, source.cached(format, export_options), providers)
    return None


def _described(
    source: Source, runtime: Runtime, path: Path, providers: Sequence[str] = ()
) -> ResolvedModel:
    """A bundle or GGUF file as it describes itself. Raises as `find_resolved` does, and
    ModelFileError for a damaged one as far as that shows without its hash."""
    if runtime.reads == "gguf":
        published: ModelInfo = runtimes.open_model_info(path)
        text = text_of_info(published, runtime)
        return ResolvedModel(
            source.name, runtime, published, published.config, text, source.profiles
        )
    bundle = open_unhashed(path)
    require_format(bundle, runtimes.format_for(runtime, {bundle.manifest.format}, providers))
    text = text_of_bundle(bundle)
    return ResolvedModel(source.name, runtime, bundle, bundle.config, text, source.profiles)


def joined_types(weight_types: frozenset[str]) -> str:
    """How a GGUF file stores its matrices, such as "Q4_K+Q6_K"; its norms are never quantized."""
    return "+".join(sorted(weight_types - {"F32"} or weight_types))
