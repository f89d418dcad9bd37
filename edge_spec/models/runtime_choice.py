"""Which runtime a model gets: the first of those installed that can run it, found from headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from edge_spec.core.entry_points import EXTRAS
from edge_spec.core.export import ExportOptions, ReadingExporter, ScreeningExporter
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.runtime_protocols import ConfigScreeningRuntime, ScreeningRuntime
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    UnsupportedModelError,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle
from edge_spec.models.options import ConversionOptions
from edge_spec.models.source import Source

_MANY_ARCHITECTURES = "llamacpp"  # reads GGUF files of all architectures that its library knows


class Refusal(NamedTuple):
    """Why a runtime cannot run a model."""

    runtime: str
    error: EdgeSpecError


@dataclass(frozen=True)
class RuntimeChoice:
    """The runtime that a model gets; refusals: of those that were asked before it; info: the header
    that it was asked with, where it was read."""

    name: str
    runtime: Runtime
    refusals: tuple[Refusal, ...] = ()
    info: ModelInfo | None = None

    def __str__(self) -> str:
        refused = "; ".join(
            f"{each.runtime} cannot run {self.name} ({each.error.shown})" for each in self.refusals
        )
        return f"{refused}: {self.runtime.name} runs it" if refused else self.runtime.name


@runtime_checkable
class LaidOut(Protocol):
    """A runtime whose bundles are laid out for one of its devices."""

    def compute(self, providers: Sequence[str]) -> str | None:
        """What a conversion for these devices is asked for (`ExportOptions.compute`).

        Raises UsageError, DeviceError for devices that `open` would refuse.
        """


def compute_for(runtime: Runtime, providers: Sequence[str]) -> str | None:
    return runtime.compute(providers) if isinstance(runtime, LaidOut) else None


def choose_runtime(
    source: Source,
    name: str,
    options: ConversionOptions,
    providers: Sequence[str] = (),
    order: Sequence[str] = (),
) -> RuntimeChoice:
    """Asks for "auto" the installed runtimes in `order`, or the usual one, of a model that no
    format binds to one. Nothing is converted, and weights stay unread.

    Raises UnsupportedModelError, MissingDependencyError where none can run it, with the command
    that installs one that may; for a file that is damaged, whatever reads it, ModelFileError.
    """
    installed = order or runtimes.installed_runtimes()
    if name != "auto" or source.is_demo or source.formats is not None or not installed:
        return RuntimeChoice(source.name, runtimes.load_runtime(name, source.formats))
    refusals: list[Refusal] = []
    for each in installed:
        try:
            runtime = runtimes.load_runtime(each)
            info = _require_runnable(source, runtime, options, providers)
        except (UnsupportedModelError, MissingDependencyError) as error:
            refusals.append(Refusal(each, error))
        else:
            return RuntimeChoice(source.name, runtime, tuple(refusals), info)
    raise _refused(source, refusals)


def _require_runnable(
    source: Source, runtime: Runtime, options: ConversionOptions, providers: Sequence[str]
) -> ModelInfo | None:
    """Returns the header of a file that the runtime opens as it is. Raises as `choose_runtime`."""
    if runtime.reads == "gguf" and _is_as_it_is(source, options):
        info = source.header
        if isinstance(runtime, ScreeningRuntime):
            runtime.require_runnable(info)
        return info
    if not is_converted(source, runtime.name, options, providers):
        require_convertible(source, runtime, providers)
    return None


def where_it_runs(
    source: Source, names: Sequence[str], options: ConversionOptions
) -> tuple[list[str], list[Refusal]]:
    """Returns those of the runtimes that can run a model which no format binds to one, and why the
    others cannot. Nothing is converted, and weights stay unread. Raises ModelFileError."""
    can: list[str] = []
    refusals: list[Refusal] = []
    for name in names:
        try:
            runtime = runtimes.load_runtime(name)
            if runtime.reads == "checkpoint":
                runtimes.open_checkpoint(source.path)
            _require_runnable(source, runtime, options, ())
        except (UnsupportedModelError, MissingDependencyError, DeviceError) as error:
            refusals.append(Refusal(name, error))
        else:
            can.append(name)
    return can, refusals


def require_convertible(source: Source, runtime: Runtime, providers: Sequence[str] = ()) -> None:
    """Checks as far as headers show it. Raises as a conversion for the runtime, on these devices,
    would."""
    format = runtimes.format_for(runtime, source.formats, providers)
    exporter, model = runtimes.exporter_for(format, source.at(format))
    if isinstance(runtime, ConfigScreeningRuntime) and not isinstance(exporter, ReadingExporter):
        runtime.require_config(model.config, model.path)
    if isinstance(exporter, ScreeningExporter):
        exporter.require_exportable(model)
    if not isinstance(exporter, ReadingExporter):
        model.tokenizer_json()


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
        extra = EXTRAS[_MANY_ARCHITECTURES]
        return UnsupportedModelError(
            f"{first.message}, which {' and '.join(asked)} cannot run",
            remedy=f'Run: pip install "edge-spec[{extra}]", which reads GGUF files of many more '
            "architectures.",
        )
    if len(refusals) == 1:
        return first
    reasons = "; ".join(f"{each.runtime}: {each.error.shown}" for each in refusals)
    return UnsupportedModelError(
        f"nothing that is installed can run {source.name}: {reasons}",
        remedy="Update the libraries, which may know it by now, or use another model.",
    )


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
        return _is_as_it_is(source, options) or gguf_in_cache(source, export_options).is_file()
    format = runtimes.format_for(chosen, source.formats, providers)
    return is_bundle(source.cached(format, export_options))


def _is_as_it_is(source: Source, options: ConversionOptions) -> bool:
    """Whether a runtime that reads GGUF files opens the very file that was named."""
    return source.path.is_file() and options.quantization is None


def gguf_in_cache(source: Source, options: ExportOptions) -> Path:
    """Where the file is kept, whether or not it exists yet."""
    cached = source.cached("gguf", options)
    return cached.with_name(f"{cached.name}.gguf")  # a model's name may have dots
