"""Resolves a model's name to what a runtime opens: fetched, converted once, described."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import (
    Model,
    ModelInfo,
    Progress,
    Runtime,
    RuntimeOptions,
    TextCodec,
    TokenizingRuntime,
)
from edge_spec.errors import BundleError, ModelFileError, UnsupportedModelError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import TOKENIZER, Bundle, is_bundle, open_bundle, open_unhashed
from edge_spec.models.kept_tokenizer import MAX_TOKENIZER_BYTES, kept_tokenizer_json
from edge_spec.models.options import ConversionOptions
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, recover, sha256_file
from edge_spec.storage.locks import single_flight
from edge_spec.text.chat_format import ChatFormat
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


@runtime_checkable
class LaidOut(Protocol):
    """A runtime whose bundles are laid out for one of its devices."""

    def compute(self, providers: Sequence[str]) -> str | None:
        """What a conversion for these devices is asked for (`ExportOptions.compute`).

        Raises UsageError, DeviceError for devices that `open` would refuse.
        """


def compute_for(runtime: Runtime, providers: Sequence[str]) -> str | None:
    return runtime.compute(providers) if isinstance(runtime, LaidOut) else None


def resolve_model(
    source: Source,
    runtime: str,
    options: ConversionOptions,
    progress: Progress,
    providers: Sequence[str] = (),
    keeps: bool = True,
) -> ResolvedModel:
    """Raises an EdgeSpecError where the runtime cannot have the model.

    runtime: "auto" is the usual one; for a pair bundle, the first that reads a format it has.
    providers: where it will run; devices of the options' target are not looked at.
    keeps: in the cache, a tokenizer that takes long to make.
    """
    chosen = runtimes.load_runtime(runtime, source.formats)
    as_it_is = True
    if chosen.reads == "checkpoint":
        published: ModelInfo = runtimes.open_checkpoint(source.at(chosen.reads))
    elif chosen.reads == "gguf":
        file = gguf_file(source, options, progress)
        as_it_is = file == source.at(chosen.reads)
        published = runtimes.open_model_info(file)
    else:
        compute = compute_for(chosen, providers)
        export_options = ExportOptions(options.quantization, options.block_size, compute=compute)
        bundle = _bundle(source, chosen.reads, export_options, progress)
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
    if not is_converted(source, runtime, options, providers):
        return None
    chosen = runtimes.load_runtime(runtime, source.formats)
    path = source.at(chosen.reads)
    as_it_is = path.is_file() and options.quantization is None
    if chosen.reads == "checkpoint" or (chosen.reads == "gguf" and (as_it_is or is_bundle(path))):
        return resolve_model(source, runtime, options, progress, providers, keeps=False)
    if is_bundle(path):
        return _described(source, chosen, path)
    compute = compute_for(chosen, providers)
    export_options = ExportOptions(options.quantization, options.block_size, compute=compute)
    with suppress(ModelFileError):
        if chosen.reads == "gguf":
            return _described(source, chosen, _gguf_in_cache(source, export_options))
        return _described(source, chosen, source.cached(chosen.reads, export_options))
    return None


def _described(source: Source, runtime: Runtime, path: Path) -> ResolvedModel:
    """A bundle or GGUF file as it describes itself. Raises as `find_resolved` does, and
    ModelFileError for a damaged one as far as that shows without its hash."""
    if runtime.reads == "gguf":
        published: ModelInfo = runtimes.open_model_info(path)
        text = text_of_info(published, runtime)
        return ResolvedModel(
            source.name, runtime, published, published.config, text, source.profiles
        )
    bundle = open_unhashed(path)
    _require_format(bundle, runtime.reads)
    text = text_of_bundle(bundle)
    return ResolvedModel(source.name, runtime, bundle, bundle.config, text, source.profiles)


def joined_types(weight_types: frozenset[str]) -> str:
    """How a GGUF file stores its matrices, such as "Q4_K+Q6_K"; its norms are never quantized."""
    return "+".join(sorted(weight_types - {"F32"} or weight_types))


def is_converted(
    source: Source, runtime: str, options: ConversionOptions, providers: Sequence[str] = ()
) -> bool:
    """Whether `resolve_model` has nothing to convert."""
    chosen = runtimes.load_runtime(runtime, source.formats)
    reads = chosen.reads
    if reads == "checkpoint" or source.member or (not source.is_demo and is_bundle(source.path)):
        return True
    compute = compute_for(chosen, providers)
    export_options = ExportOptions(options.quantization, options.block_size, compute=compute)
    if reads == "gguf":
        as_it_is = source.path.is_file() and options.quantization is None
        return as_it_is or _gguf_in_cache(source, export_options).is_file()
    return is_bundle(source.cached(reads, export_options))


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
    cached = _gguf_in_cache(source, export_options)

    def convert() -> None:
        checkpoint = runtimes.open_checkpoint(path)
        runtimes.load_exporter("gguf").export(checkpoint, cached, export_options, progress)
        with atomic_file(_digest_file(cached)) as file:
            file.write_text(sha256_file(cached), encoding="ascii")

    return _converted(cached, partial(_cached_gguf, cached), convert, progress)


def _gguf_in_cache(source: Source, options: ExportOptions) -> Path:
    """Where the file is kept, whether or not it exists yet."""
    cached = source.cached("gguf", options)
    return cached.with_name(f"{cached.name}.gguf")  # a model's name may have dots


def _bundle(source: Source, format: str, options: ExportOptions, progress: Progress) -> Bundle:
    path = source.at(format)
    if not source.is_demo and is_bundle(path):
        bundle = open_bundle(path)
        _require_format(bundle, format)
        return bundle
    cached = source.cached(format, options)

    def convert() -> None:
        exporter, model = runtimes.exporter_for(format, path)
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
        if sha256_file(cached) == _digest_file(cached).read_text(encoding="ascii"):
            return cached
    return None


def _digest_file(cached: Path) -> Path:
    return cached.with_name(f"{cached.name}.sha256")


def _require_format(bundle: Bundle, format: str) -> None:
    if bundle.manifest.format != format:
        raise UsageError(
            f"{bundle.path} is a bundle of format {bundle.manifest.format}",
            remedy=f"The chosen runtime reads {format}; choose another with --runtime.",
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
        tokenizer=Tokenizer(json, manifest.bos_id if manifest.adds_bos else None),
        chat_template=manifest.chat_template,
        eos_ids=manifest.eos_ids,
        bos_id=manifest.bos_id,
    )


def text_of_info(published: ModelInfo, runtime: Runtime, keeps: bool = False) -> ChatFormat:
    """keeps: as in `resolve_model`.

    Raises UnsupportedModelError where neither we nor the runtime can have its tokenizer.
    """
    try:
        json = kept_tokenizer_json(published) if keeps else published.tokenizer_json()
        tokenizer: TextCodec = Tokenizer(json, published.bos_id if published.adds_bos else None)
    except UnsupportedModelError:
        if not isinstance(runtime, TokenizingRuntime):
            raise
        tokenizer = runtime.open_tokenizer(published)
    return ChatFormat(
        tokenizer=tokenizer,
        chat_template=published.chat_template,
        eos_ids=published.eos_ids,
        bos_id=published.bos_id,
    )
