"""Chooses a model's runtime: the first of those installed that can run it, found from headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge_spec.core.entry_points import EXTRAS
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    UnsupportedModelError,
)
from edge_spec.models import runtimes
from edge_spec.models.options import ConversionOptions
from edge_spec.models.resolution import Refusal, Resolution, resolution_on
from edge_spec.models.source import Source

_MANY_ARCHITECTURES = "llamacpp"  # reads GGUF files of all architectures that its library knows


def choose_runtime(
    source: Source,
    name: str,
    options: ConversionOptions,
    providers: Sequence[str] = (),
    order: Sequence[str] = (),
) -> Resolution:
    """Asks for "auto" the installed runtimes in `order`, or the usual one, of a model that no
    format binds to one. Nothing is converted, and weights stay unread.

    Raises UnsupportedModelError, MissingDependencyError where none can run it, with the command
    that installs one that may; for a file that is damaged, whatever reads it, ModelFileError.
    """
    installed = order or runtimes.installed_runtimes()
    if name != "auto" or source.is_demo or source.formats is not None or not installed:
        return resolution_on(source, name, options, providers)
    refusals: list[Refusal] = []
    for each in installed:
        try:
            found = resolution_on(source, each, options, providers).screened()
        except (UnsupportedModelError, MissingDependencyError) as error:
            refusals.append(Refusal(each, error))
        else:
            return replace(found, refusals=tuple(refusals))
    raise _refused(source, refusals)


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
