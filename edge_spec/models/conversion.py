"""A model in the format that a runtime reads: as it is, or converted once and kept in the cache."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.errors import BundleError, ModelFileError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, is_bundle, open_bundle
from edge_spec.models.options import ConversionOptions
from edge_spec.models.runtime_choice import gguf_in_cache
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, recover, sha256_file
from edge_spec.storage.digests import known_sha256
from edge_spec.storage.locks import single_flight

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", Bundle, Path)


def gguf_file(
    source: Source,
    options: ConversionOptions,
    progress: Progress,
    before_conversion: Callable[[Any], None] | None = None,
) -> Path:
    """A GGUF file as it is; anything else, or with another quantization, converted once.
    before_conversion: as of `resolve_model`."""
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
        if before_conversion is not None:
            before_conversion(checkpoint)
        runtimes.load_exporter("gguf").export(checkpoint, cached, export_options, progress)
        with atomic_file(_digest_file(cached)) as file:
            file.write_text(sha256_file(cached), encoding="ascii")

    return _converted(cached, partial(_cached_gguf, cached), convert, progress)


def bundle_of(
    source: Source,
    format: str,
    options: ExportOptions,
    progress: Progress,
    before_conversion: Callable[[Any], None] | None,
) -> Bundle:
    """A bundle as it is; anything else converted once. before_conversion: is shown the model that
    has to be converted, and may raise. Raises UsageError for a bundle of another format."""
    path = source.at(format)
    if not source.is_demo and is_bundle(path):
        bundle = open_bundle(path)
        require_format(bundle, format)
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


def require_format(bundle: Bundle, format: str) -> None:
    """Raises UsageError for a bundle of another format."""
    if bundle.manifest.format != format:
        raise UsageError(
            f"{bundle.path} is a bundle of format {bundle.manifest.format}",
            remedy=f"The chosen runtime and device read {format}; choose others with --runtime "
            "and --device.",
        )
