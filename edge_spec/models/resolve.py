"""Resolves a model's name to what a runtime opens: fetched, converted once, described."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Model, Progress, Runtime, RuntimeOptions, ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.runtime_protocols import ScreeningRuntime
from edge_spec.errors import ModelFileError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_unhashed
from edge_spec.models.conversion import bundle_of, gguf_file, require_format
from edge_spec.models.model_text import text_of_bundle, text_of_info
from edge_spec.models.options import ConversionOptions
from edge_spec.models.runtime_choice import Resolution, choose_runtime
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
    make_text: Callable[[], ChatFormat]
    profiles: Path | None = None  # that came with it
    as_it_is: bool = False  # whether the runtime reads the very file that was named
    scored_tokens: ScoredTokens | None = None  # of a draft that need not score all

    @cached_property
    def text(self) -> ChatFormat:
        """Returns what reads and writes its text, which is made when it is first asked for: a large
        vocabulary takes a third of a second. Raises ModelFileError, and UnsupportedModelError where
        neither we nor the runtime can have its tokenizer."""
        return self.make_text()

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
        options = replace(options, scored_tokens=self.scored_tokens)
        return self.runtime.open(self.source, options)


def resolve_model(
    source: Source,
    runtime: str,
    options: ConversionOptions,
    progress: Progress,
    providers: Sequence[str] = (),
) -> ResolvedModel:
    """Chooses a runtime and prepares the model for it: see `choose_runtime`, `prepare_model`.

    Raises an EdgeSpecError where the runtime cannot have the model.
    """
    return prepare_model(choose_runtime(source, runtime, options, providers), progress)


def prepare_model(
    resolution: Resolution,
    progress: Progress,
    before_conversion: Callable[[Any], None] | None = None,
    keeps: bool = True,
) -> ResolvedModel:
    """Converts the model if its runtime does not read it as it is, and opens its header.

    One line says which runtimes refused it before. before_conversion: is shown a model that has to
    be converted, and may raise. keeps: in the cache, a tokenizer that takes long to make.
    Raises an EdgeSpecError where the runtime cannot have the model.
    """
    if resolution.refusals:
        _log.warning("%s", resolution)
    resolution.require_devices()
    source, runtime, stored = resolution.source, resolution.runtime, resolution.stored
    if runtime.reads == "checkpoint":
        return _from_info(resolution, runtimes.open_checkpoint(source.at("checkpoint")), keeps)
    if runtime.reads != "gguf":
        return _from_bundle(resolution, bundle_of(stored, progress, before_conversion))
    file = gguf_file(stored, progress, before_conversion)
    info = source.header if file == stored.own else runtimes.open_model_info(file)
    if not resolution.is_screened and isinstance(runtime, ScreeningRuntime):
        runtime.require_runnable(info)
    return _from_info(resolution, info, keeps)


def find_resolved(resolution: Resolution, progress: Progress) -> ResolvedModel | None:
    """Prepares a model for a look at it alone: nothing is converted, written or hashed.

    Returns None where it would have to be converted, also since a conversion is damaged.
    """
    stored = resolution.stored
    if not stored.is_there:
        return None
    is_gguf = resolution.runtime.reads == "gguf"
    if stored.own is not None and (is_gguf or resolution.runtime.reads == "checkpoint"):
        return prepare_model(replace(resolution, refusals=()), progress, keeps=False)
    if stored.own is not None:
        return _described(resolution, stored.own)
    with suppress(ModelFileError):
        if is_gguf:
            return _from_info(resolution, runtimes.open_model_info(stored.kept), keeps=False)
        return _described(resolution, stored.kept)
    return None


def _described(resolution: Resolution, path: Path) -> ResolvedModel:
    """Returns a bundle as it describes itself. Raises ModelFileError for damage that shows without
    its hash, UsageError for another format than the runtime's."""
    bundle = open_unhashed(path)
    formats = {bundle.manifest.format}
    require_format(bundle, runtimes.format_for(resolution.runtime, formats, resolution.providers))
    return _from_bundle(resolution, bundle)


def _from_bundle(resolution: Resolution, bundle: Bundle) -> ResolvedModel:
    source, make_text = resolution.source, partial(text_of_bundle, bundle)
    return ResolvedModel(
        source.name, resolution.runtime, bundle, bundle.config, make_text, source.profiles
    )


def _from_info(resolution: Resolution, info: ModelInfo, keeps: bool) -> ResolvedModel:
    source, runtime = resolution.source, resolution.runtime
    make_text = partial(text_of_info, info, runtime, keeps)
    as_it_is = resolution.stored.own is not None
    return ResolvedModel(
        source.name, runtime, info, info.config, make_text, source.profiles, as_it_is
    )


def joined_types(weight_types: frozenset[str]) -> str:
    """Returns how a GGUF file stores its matrices, such as "Q4_K+Q6_K"; its norms are never
    quantized."""
    return "+".join(sorted(weight_types - {"F32"} or weight_types))
