"""Chooses a model's runtime: the first of those installed that can run it, found from headers.

In which order they are asked is decided in `edge_spec.placement.runtime_order`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from edge_spec.core.export import ExportOptions, ReadingExporter, ScreeningExporter
from edge_spec.core.model import Runtime
from edge_spec.core.runtime_protocols import (
    ConfigScreeningRuntime,
    DeviceScreeningRuntime,
    LaidOut,
    ScreeningRuntime,
)
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    UnsupportedModelError,
)
from edge_spec.models import runtimes
from edge_spec.models.conversion import StoredModel
from edge_spec.models.options import ConversionOptions
from edge_spec.models.source import Source

_MANY_ARCHITECTURES = "llamacpp"  # reads GGUF files of all architectures that its library knows


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
    options: ConversionOptions
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
    source: Source, name: str, options: ConversionOptions, providers: Sequence[str] = ()
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
    options: ConversionOptions
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
    source: Source, name: str, options: ConversionOptions, providers: Sequence[str] = ()
) -> RuntimeCandidates:
    """Lists the installed runtimes, the usual one first, for "auto" and a model that no format
    binds to one; else the one that was asked for. None of them is loaded yet."""
    installed = runtimes.installed_runtimes()
    is_bound = name != "auto" or source.formats is not None or not installed
    names = (name,) if is_bound else tuple(installed)
    return RuntimeCandidates(source, names, options, tuple(providers), is_bound)


def choose_runtime(
    source: Source, name: str, options: ConversionOptions, providers: Sequence[str] = ()
) -> Resolution:
    """Chooses in the usual order. Raises as `candidates_for` and `RuntimeCandidates.choose`."""
    return candidates_for(source, name, options, providers).choose()


def where_it_runs(
    source: Source, names: Sequence[str], options: ConversionOptions
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
