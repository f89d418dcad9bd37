"""Resolves a model's name to what a runtime opens: fetched, converted once, described."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, Progress, Runtime, RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.recommended_sampling import recommended_sampling
from edge_spec.core.runtime_protocols import (
    DeviceScreeningRuntime,
    ScreeningRuntime,
    TokenizingRuntime,
)
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import BundleError, ModelFileError, UnsupportedModelError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import TOKENIZER, Bundle, is_bundle, open_bundle, open_unhashed
from edge_spec.models.kept_tokenizer import MAX_TOKENIZER_BYTES, kept_tokenizer_json
from edge_spec.models.options import ConversionOptions
from edge_spec.models.runtime_choice import (
    choose_runtime,
    compute_for,
    gguf_in_cache,
    is_converted,
)
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, recover, sha256_file
from edge_spec.storage.digests import known_sha256
from edge_spec.storage.locks import single_flight
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.source_text import SourceEnd
from edge_spec.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", Bundle, Path)


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
    before_conversion: is shown a model that has to be converted for a bundle, and may raise.
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
        file = gguf_file(source, options, progress)
        as_it_is = file == source.at(chosen.reads)
        published = source.header if as_it_is else runtimes.open_model_info(file)
        if choice.info is None and isinstance(chosen, ScreeningRuntime):
            chosen.require_runnable(published)
    else:
        compute = compute_for(chosen, providers)
        export_options = ExportOptions(options.quantization, options.block_size, compute=compute)
        format = runtimes.format_for(chosen, source.formats, providers)
        bundle = _bundle(source, format, export_options, progress, before_conversion)
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
    _require_format(bundle, runtimes.format_for(runtime, {bundle.manifest.format}, providers))
    text = text_of_bundle(bundle)
    return ResolvedModel(source.name, runtime, bundle, bundle.config, text, source.profiles)


def joined_types(weight_types: frozenset[str]) -> str:
    """How a GGUF file stores its matrices, such as "Q4_K+Q6_K"; its norms are never quantized."""
    return "+".join(sorted(weight_types - {"F32"} or weight_types))


def gguf_file(source: Source, options: ConversionOptions, progress: Progress) -> Path:
    """A GGUF file as it is; anything else, or with another quantization, converted once."""
    path = source.at("gguf")
    if not source.is_demo and is_bundle(path):
        raise UsageError(
            f"{path} is a bundle, not a GGUF file",
            remedy="Choose another --runtime, or give the model that the bundle was made from.",
        )
    if path.is_file() and options.quantization is None:
        return path
    export_options = ExportOptions(options.quantization, options.block_size)
    cached = gguf_in_cache(source, export_options)

    def convert() -> None:
        checkpoint = runtimes.open_checkpoint(path)
        runtimes.load_exporter("gguf").export(checkpoint, cached, export_options, progress)
        with atomic_file(_digest_file(cached)) as file:
            file.write_text(sha256_file(cached), encoding="ascii")

    return _converted(cached, partial(_cached_gguf, cached), convert, progress)


def _bundle(
    source: Source,
    format: str,
    options: ExportOptions,
    progress: Progress,
    before_conversion: Callable[[Any], None] | None,
) -> Bundle:
    path = source.at(format)
    if not source.is_demo and is_bundle(path):
        bundle = open_bundle(path)
        _require_format(bundle, format)
        return bundle
    cached = source.cached(format, options)

    def convert() -> None:
        exporter, model = runtimes.exporter_for(format, path)
        if before_conversion is not None:
            before_conversion(model)
        shutil.rmtree(cached, ignore_errors=True)  # a damaged one
        exporter.export(model, cached, options, progress)

    return _converted(cached, partial(_cached_bundle, cached), convert, progress)


def _converted(
    cached: Path, find: Callable[[], _Found | None], convert: Callable[[], None], progress: Progress
) -> _Found:
    """What `find` finds, after `convert` where that is nothing: once, also where several processes
    want it, of which the others wait."""
    found = find()
    if found is not None:
        return found
    waiting = partial(progress, "Waiting for another process that converts the model", 0.0)
    with single_flight(cached, waiting):
        found = find()
        if found is None:
            if cached.exists():
                _log.warning("%s is damaged or incomplete: the model is converted again", cached)
            convert()
            found = find()
    if found is None:
        raise ModelFileError(
            f"{cached} is damaged as soon as it is written", remedy="Check the disk it is on."
        )
    return found


def _cached_bundle(cached: Path) -> Bundle | None:
    recover(cached)
    with suppress(BundleError):
        return open_bundle(cached)
    return None


def _cached_gguf(cached: Path) -> Path | None:
    with suppress(OSError):
        if known_sha256(cached) == _digest_file(cached).read_text(encoding="ascii"):
            return cached
    return None


def _digest_file(cached: Path) -> Path:
    return cached.with_name(f"{cached.name}.sha256")


def _require_format(bundle: Bundle, format: str) -> None:
    if bundle.manifest.format != format:
        raise UsageError(
            f"{bundle.path} is a bundle of format {bundle.manifest.format}",
            remedy=f"The chosen runtime and device read {format}; choose others with --runtime "
            "and --device.",
        )


def text_of_bundle(bundle: Bundle) -> ChatFormat:
    """Raises ModelFileError for a tokenizer that cannot be read, or is larger than any is."""
    manifest = bundle.manifest
    file = bundle.file(TOKENIZER)
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelFileError(
            f"{file} is larger than {MAX_TOKENIZER_BYTES // 10**6} MB",
            remedy="Do not use this model.",
        )
    try:
        json = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(f"{file} is no text", remedy="Export the model again.") from None
    return ChatFormat(
        tokenizer=Tokenizer(
            json,
            manifest.bos_id if manifest.adds_bos else None,
            source_end(bundle.config, manifest.eos_ids),
        ),
        chat_template=manifest.chat_template,
        eos_ids=manifest.eos_ids,
        bos_id=manifest.bos_id,
        sampling=recommended_sampling(manifest.sampling),
    )


def source_end(config: ModelConfig, eos_ids: Sequence[int]) -> SourceEnd | None:
    """Returns what stands between a source and its answer; None where a model has no encoder."""
    encoder = config.encoder
    if encoder is None:
        return None
    return SourceEnd((*eos_ids[:1], *encoder.beginning), encoder.start_id)


def text_of_info(published: ModelInfo, runtime: Runtime, keeps: bool = False) -> ChatFormat:
    """keeps: as in `resolve_model`.

    Raises UnsupportedModelError where neither we nor the runtime can have its tokenizer.
    """
    try:
        json = kept_tokenizer_json(published) if keeps else published.tokenizer_json()
        tokenizer: TextCodec = Tokenizer(
            json,
            published.bos_id if published.adds_bos else None,
            source_end(published.config, published.eos_ids),
        )
    except UnsupportedModelError:
        if not isinstance(runtime, TokenizingRuntime):
            raise
        tokenizer = runtime.open_tokenizer(published)
    return ChatFormat(
        tokenizer=tokenizer,
        chat_template=published.chat_template,
        eos_ids=published.eos_ids,
        bos_id=published.bos_id,
        sampling=published.sampling,
    )
