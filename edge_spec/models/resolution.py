"""Decides once how a model is run: by which runtime, on which devices, from which file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from edge_spec.errors import EdgeSpecError
from edge_spec.models import runtimes
from edge_spec.models.conversion import StoredModel
from edge_spec.models.options import ConversionOptions
from edge_spec.models.source import Source


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
        if isinstance(self.runtime, ConfigScreeningRuntime) and not reads_itself:
            self.runtime.require_config(model.config, model.path)
        if isinstance(exporter, ScreeningExporter):
            exporter.require_exportable(model)
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
