"""The device on which a library means to run each operation of a model, for `edge-spec devices
--model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from edge_spec.core import entry_points
from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle

UNKNOWN = "unknown"  # a device that the library does not tell


@dataclass(frozen=True)
class FunctionPlacement:
    """Counts the operations of one function of a model, constants left out; largest first.

    shares: of the estimated cost, which add up to 1; empty where the library tells no costs.
    fallbacks: operations by their kind that the device which was asked for cannot run.
    """

    function: str
    operations: Mapping[str, int]  # by device
    shares: Mapping[str, float]  # by device
    fallbacks: Mapping[str, int]


@runtime_checkable
class Placing(Protocol):
    """A runtime that knows where operations of its models will run."""

    def placements(self, source: Any, options: RuntimeOptions) -> Sequence[FunctionPlacement]:
        """source, options: what `open` takes. Raises DeviceError where the library cannot tell."""


def placements_of(bundle: Bundle) -> Sequence[FunctionPlacement]:
    """Asks the first installed runtime that reads the bundle and can tell. Raises UsageError where
    there is none."""
    format = bundle.manifest.format
    for runtime in _installed():
        if format in runtimes.formats_of(runtime) and isinstance(runtime, Placing):
            return runtime.placements(bundle, RuntimeOptions())
    raise UsageError(
        f"no runtime tells where operations of {bundle.path} run, a bundle of format {format}",
        remedy="Core ML does: give a bundle that was exported with --format coreml.",
    )


def _installed() -> Iterator[Runtime]:
    for name in entry_points.names("runtimes"):
        try:
            yield runtimes.load_runtime(name)
        except MissingDependencyError:
            continue
