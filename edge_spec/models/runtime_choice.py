"""Chooses a model's runtime: the first of those installed that can run it, found from headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class RuntimeCandidates:
    """The runtimes that may run a model, in the order in which they are asked.

    Each is loaded when it is looked at first, and once: a library may take long to import.
    is_bound: there is one alone, which was asked for by name or is bound by the model's format.
    """

    source: Source
    names: tuple[str, ...]
    options: ConversionOptions
    providers: tuple[str, ...] = ()
    is_bound: bool = False
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
        refusals: list[Refusal] = []
        for name in self.names:
            try:
                return replace(self.resolution(name).screened(), refusals=tuple(refusals))
            except (UnsupportedModelError, MissingDependencyError) as error:
                refusals.append(Refusal(name, error))
        raise _refused(self.source, refusals)


def candidates_for(
    source: Source, name: str, options: ConversionOptions, providers: Sequence[str] = ()
) -> RuntimeCandidates:
    """Lists the installed runtimes, the usual one first, for "auto" and a model that no format
    binds to one; else the one that was asked for. None of them is loaded yet."""
    installed = runtimes.installed_runtimes()
    is_bound = name != "auto" or source.is_demo or source.formats is not None or not installed
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
