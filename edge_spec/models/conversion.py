"""A model in the format that a runtime reads: as it is, or converted once and kept in the cache."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Progress
from edge_spec.errors import BundleError, ModelFileError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, is_bundle, open_bundle
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, sha256_file
from edge_spec.storage.digests import known_sha256
from edge_spec.storage.locks import single_flight

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", Bundle, Path)


@dataclass(frozen=True)
class StoredModel:
    """A model in one format: the very file or bundle that was named, or its conversion."""

    source: Source
    format: str  # "checkpoint": whatever exporters read
    options: ExportOptions

    @cached_property
    def own(self) -> Path | None:
        """Returns what was named, if it is opened as it is; None if a conversion is. Raises as
        `Source.at` does."""
        is_demo = self.source.is_demo
        if is_demo and self.format not in ("checkpoint", "gguf"):
            return None  # the demo is in no such format, and need not be fetched to know it
        path = self.source.at(self.format)
        if self.format == "checkpoint" or (not is_demo and is_bundle(path)):
            return path
        is_file = self.format == "gguf" and path.is_file()
        return path if is_file and self.options.quantization is None else None

    @cached_property
    def kept(self) -> Path:
        """Returns where the conversion is kept, whether or not it exists yet."""
        cached = self.source.cached(self.format, self.options)
        # A model's name may have dots, so the suffix is added to all of it.
        return cached.with_name(f"{cached.name}.gguf") if self.format == "gguf" else cached

    @property
    def is_there(self) -> bool:
        """Says whether nothing has to be converted."""
        if self.own is not None:
            return True
        return self.kept.is_file() if self.format == "gguf" else is_bundle(self.kept)


def gguf_file(
    stored: StoredModel,
    progress: Progress,
    before_conversion: Callable[[Any], None] | None = None,
) -> Path:
    """Returns a GGUF file as it is; anything else, or with another quantization, is converted once.

    before_conversion: is shown the model that has to be converted, and may raise. Raises UsageError
    for a bundle.
    """
    path = stored.source.at("gguf")
    if not stored.source.is_demo and is_bundle(path):
        raise UsageError(
            f"{path} is a bundle, not a GGUF file",
            remedy="Choose another --runtime, or give the model that the bundle was made from.",
        )
    if stored.own is not None:
        return stored.own
    cached = stored.kept

    def convert() -> None:
        checkpoint = runtimes.open_checkpoint(path)
        if before_conversion is not None:
            before_conversion(checkpoint)
        runtimes.load_exporter("gguf").export(checkpoint, cached, stored.options, progress)
        with atomic_file(_digest_file(cached)) as file:
            file.write_text(sha256_file(cached), encoding="ascii")

    return _converted(cached, partial(_cached_gguf, cached), convert, progress)


def bundle_of(
    stored: StoredModel, progress: Progress, before_conversion: Callable[[Any], None] | None
) -> Bundle:
    """Returns a bundle as it is; anything else is converted once. before_conversion: as of
    `gguf_file`. Raises UsageError for a bundle of another format."""
    if stored.own is not None:
        bundle = open_bundle(stored.own)
        require_format(bundle, stored.format)
        return bundle
    cached = stored.kept

    def convert() -> None:
        exporter, model = runtimes.exporter_for(stored.format, stored.source.at(stored.format))
        if before_conversion is not None:
            before_conversion(model)
        shutil.rmtree(cached, ignore_errors=True)  # a damaged one
        exporter.export(model, cached, stored.options, progress)

    return _converted(cached, partial(_cached_bundle, cached), convert, progress)


def _converted(
    cached: Path, find: Callable[[], _Found | None], convert: Callable[[], None], progress: Progress
) -> _Found:
    """Returns what `find` finds. If that is nothing, `convert` is called first: once, also if
    several processes want it, of which the others wait."""
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
