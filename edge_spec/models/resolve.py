"""Resolves a model's name to what a runtime opens: the first of those installed that can run it,
found from headers, and the model as it reads it, converted once and kept in the cache.

In which order runtimes are asked is decided in `edge_spec.placement.runtime_order`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ReadingExporter, ScreeningExporter
from edge_spec.core.model import Model, Progress, Runtime, RuntimeOptions, ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.runtime_protocols import (
    ConfigScreeningRuntime,
    DeviceScreeningRuntime,
    LaidOut,
    ScreeningRuntime,
)
from edge_spec.errors import (
    BundleError,
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, is_bundle, open_bundle
from edge_spec.models.model_text import text_of_bundle, text_of_info
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, sha256_file, single_flight
from edge_spec.storage.measurements import known_sha256
from edge_spec.text.chat_format import ChatFormat

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", Bundle, Path)
_MANY_ARCHITECTURES = "llamacpp"  # reads GGUF files of all architectures that its library knows


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
    return stored.own or _converted(stored, _cached_gguf, progress, before_conversion)


def bundle_of(
    stored: StoredModel, progress: Progress, before_conversion: Callable[[Any], None] | None
) -> Bundle:
    """Returns a bundle as it is; anything else is converted once. before_conversion: as of
    `gguf_file`. Raises UsageError for a bundle of another format."""
    if stored.own is not None:
        bundle = open_bundle(stored.own)
        require_format(bundle, stored.format)
        return bundle
    return _converted(stored, _cached_bundle, progress, before_conversion)


def _converted(
    stored: StoredModel,
    find: Callable[[Path], _Found | None],
    progress: Progress,
    before_conversion: Callable[[Any], None] | None,
) -> _Found:
    """Returns what `find` finds. If that is nothing, the model is converted first: once, also if
    several processes want it, of which the others wait."""
    cached = stored.kept
    found = find(cached)
    if found is not None:
        return found
    waiting = partial(progress, "Waiting for another process that converts the model", 0.0)
    with single_flight(cached, waiting):
        found = find(cached)
        if found is None:
            if cached.exists():
                _log.warning("%s is damaged or incomplete: the model is converted again", cached)
            exporter, model = runtimes.exporter_for(stored.format, stored.source.at(stored.format))
            if before_conversion is not None:
                before_conversion(model)
            if cached.is_dir():
                shutil.rmtree(cached, ignore_errors=True)  # a damaged one
            exporter.export(model, cached, stored.options, progress)
            if stored.format == "gguf":
                with atomic_file(_digest_file(cached)) as file:
                    file.write_text(sha256_file(cached), encoding="ascii")
            found = find(cached)
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


class Refusal(NamedTuple):
    """Why a runtime cannot run a model."""

    runtime: str
    error: EdgeSpecError


@dataclass(frozen=True)
class Resolution:
    """A model, the runtime and devices that it gets, and what that runtime opens.

    Everything is found from headers: nothing is converted, and no weights are read. refusals: why
    runtimes that were asked before this one cannot run the model. is_screened: the runtime has
    found in the file's header that it can.
    """

    source: Source
    runtime: Runtime
    options: LoadOptions
    providers: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    is_screened: bool = False

    @cached_property
    def stored(self) -> StoredModel:
        """Returns what the runtime opens. Raises as `Source.member` does, and UsageError,
        DeviceError for devices that the runtime does not have."""
        runtime, source, providers = self.runtime, self.source, self.providers
        compute = runtime.compute(providers) if isinstance(runtime, LaidOut) else None
        options = ExportOptions(self.options.quantization, self.options.block_size, compute=compute)
        format = runtimes.format_for(runtime, source.formats, providers)
        return StoredModel(source, format, options)

    @property
    def reads_header(self) -> bool:
        """Says whether the header of a GGUF file is read in any case."""
        return self.runtime.reads == "gguf" or not self.stored.is_there

    def require_devices(self) -> None:
        """Raises UsageError, DeviceError, MissingDependencyError for devices that are not here, if
        the runtime can say so without a model."""
        if self.providers and isinstance(self.runtime, DeviceScreeningRuntime):
            self.runtime.require_devices(self.providers)

    def screened(self) -> Resolution:
        """Returns it after a look at the headers.

        Raises UnsupportedModelError, MissingDependencyError where the runtime cannot run the model,
        and ModelFileError for a damaged file.
        """
        if self.runtime.reads == "gguf" and self.stored.own is not None:
            info = self.source.header
            if isinstance(self.runtime, ScreeningRuntime):
                self.runtime.require_runnable(info)
            return replace(self, is_screened=True)
        if not self.stored.is_there:
            self.require_convertible()
        return self

    def require_convertible(self) -> None:
        """Raises what a conversion for the runtime would, if headers show it."""
        format = self.stored.format
        exporter, model = runtimes.exporter_for(format, self.source.at(format))
        reads_itself = isinstance(exporter, ReadingExporter)
        if isinstance(exporter, ScreeningExporter):
            exporter.require_exportable(model)  # first: what a runtime names instead may need it
        if isinstance(self.runtime, ConfigScreeningRuntime) and not reads_itself:
            self.runtime.require_config(model.config, model.path)
        if not reads_itself:
            model.tokenizer_json()

    def __str__(self) -> str:
        name = self.source.name
        refused = "; ".join(
            f"{each.runtime} cannot run {name} ({each.error.shown})" for each in self.refusals
        )
        return f"{refused}: {self.runtime.name} runs it" if refused else self.runtime.name


def resolution_on(
    source: Source, name: str, options: LoadOptions, providers: Sequence[str] = ()
) -> Resolution:
    """Returns how this runtime would run the model; it is not asked yet. "auto" is
    `auto_runtime`."""
    formats = source.formats if name == "auto" else None
    return Resolution(source, runtimes.load_runtime(name, formats), options, tuple(providers))


@dataclass(frozen=True)
class RuntimeCandidates:
    """The runtimes that may run a model, in the order in which they are asked.

    Each is loaded when it is looked at first, and once: a library may take long to import.
    is_bound: there is one alone, which was asked for by name or is bound by the model's format.
    refusals: why others cannot run the model, which were asked before.
    """

    source: Source
    names: tuple[str, ...]
    options: LoadOptions
    providers: tuple[str, ...] = ()
    is_bound: bool = False
    refusals: tuple[Refusal, ...] = ()
    _loaded: dict[str, Resolution] = field(default_factory=dict, repr=False, compare=False)

    def resolution(self, name: str) -> Resolution:
        """Returns how this runtime would run the model. Raises MissingDependencyError where its
        library cannot be loaded."""
        if name not in self._loaded:
            found = resolution_on(self.source, name, self.options, self.providers)
            self._loaded[name] = found
        return self._loaded[name]

    def choose(self) -> Resolution:
        """Returns the first that can run the model. Nothing is converted, and weights stay unread.

        Raises UnsupportedModelError, MissingDependencyError if none can run it, with the command
        that installs one that may; for a file that is damaged, whatever reads it, ModelFileError.
        """
        if self.is_bound:
            return self.resolution(self.names[0])
        refusals = list(self.refusals)
        for name in self.names:
            try:
                return replace(self.resolution(name).screened(), refusals=tuple(refusals))
            except (UnsupportedModelError, MissingDependencyError) as error:
                refusals.append(Refusal(name, error))
        raise _refused(self.source, refusals)

    def after(self, chosen: Resolution) -> RuntimeCandidates | None:
        """Returns those that were to be asked after this one; None where there are none."""
        left = self.names[self.names.index(chosen.runtime.name) + 1 :]
        return replace(self, names=left, refusals=chosen.refusals) if left else None

    def without_conversion(self) -> RuntimeCandidates | None:
        """Returns those for which nothing has to be converted; None where there are none."""
        left = tuple(name for name in self.names if self.resolution(name).stored.is_there)
        return replace(self, names=left) if left else None


def candidates_for(
    source: Source, name: str, options: LoadOptions, providers: Sequence[str] = ()
) -> RuntimeCandidates:
    """Lists the installed runtimes, the usual one first, for "auto" and a model that no format
    binds to one; else the one that was asked for. None of them is loaded yet."""
    installed = runtimes.installed_runtimes()
    is_bound = name != "auto" or source.formats is not None or not installed
    names = (name,) if is_bound else tuple(installed)
    return RuntimeCandidates(source, names, options, tuple(providers), is_bound)


def where_it_runs(
    source: Source, names: Sequence[str], options: LoadOptions
) -> tuple[list[str], list[Refusal]]:
    """Returns those of the runtimes that can run a model which no format binds to one, and why the
    others cannot. Nothing is converted, and weights stay unread. Raises ModelFileError."""
    can: list[str] = []
    refusals: list[Refusal] = []
    for name in names:
        try:
            resolution = resolution_on(source, name, options)
            if resolution.runtime.reads == "checkpoint":
                runtimes.open_checkpoint(source.path)
            resolution.screened()
        except (UnsupportedModelError, MissingDependencyError, DeviceError) as error:
            refusals.append(Refusal(name, error))
        else:
            can.append(name)
    return can, refusals


def _refused(source: Source, refusals: Sequence[Refusal]) -> EdgeSpecError:
    """One error for all of them, which names what may help."""
    if source.path.is_file():
        try:
            _ = source.header
        except EdgeSpecError as error:  # no runtime's own: it is of another kind
            return error
    for each in refusals:
        if isinstance(each.error, MissingDependencyError):
            return each.error
    first = refusals[0].error
    asked = [each.runtime for each in refusals]
    if source.path.is_file() and _MANY_ARCHITECTURES not in asked:
        return UnsupportedModelError(
            f"{first.message}, which {' and '.join(asked)} cannot run",
            remedy=f'Run: pip install "edge-spec[{_MANY_ARCHITECTURES}]", which reads GGUF files '
            "of many more architectures.",
        )
    if len(refusals) == 1:
        return first
    reasons = "; ".join(f"{each.runtime}: {each.error.shown}" for each in refusals)
    return UnsupportedModelError(
        f"nothing that is installed can run {source.name}: {reasons}",
        remedy="Update the libraries, which may know it by now, or use another model.",
    )


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
    options: LoadOptions,
    progress: Progress,
    providers: Sequence[str] = (),
) -> ResolvedModel:
    """Chooses a runtime, in the usual order, and prepares the model for it: see `prepare_model`.

    Raises an EdgeSpecError where the runtime cannot have the model.
    """
    return prepare_model(candidates_for(source, runtime, options, providers).choose(), progress)


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
    bundle = open_bundle(path, hashed=False)
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
