"""Opens bundles with a Core ML package on Core ML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.errors import DeviceError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import GPU, Device, FunctionPlacement
from edge_spec.runtimes.coreml.native import (
    ANE,
    FORMAT,
    UNITS,
    NativeProgram,
    compiled_package,
    compute_devices,
    compute_of,
    package_of,
    read_plan,
    read_specification,
    require_core_ml,
    signatures_of_spec,
    summarize,
)
from edge_spec.runtimes.static.session import Layout, Signature, StaticModel, config_of, read_layout


@dataclass(frozen=True)
class OpenedPackage:
    """Holds what a package says of itself."""

    package: Path
    specification: Any  # coremltools' protocol buffer
    signatures: Mapping[str, Signature]
    layout: Layout

    @classmethod
    def of(cls, bundle: Bundle) -> OpenedPackage:
        """Raises UsageError, BundleError."""
        package = package_of(bundle)
        specification = read_specification(package)
        signatures = signatures_of_spec(specification)
        layout = read_layout(signatures, bundle.config, str(package))
        return cls(package, specification, signatures, layout)

    @property
    def unit(self) -> str:
        """Returns the unit that the package was laid out for."""
        return compute_of(self.specification) or GPU


class CoreMlRuntime(Runtime):
    name = "coreml"
    reads = FORMAT

    def open(self, source: Bundle, options: RuntimeOptions) -> StaticModel:
        """Raises DeviceError on other systems than macOS, UsageError, BundleError."""
        # Threads are Core ML's own matter; a draft is given its target's.
        options.require_only(self.name, "threads", "providers", "context_length")
        asked = _unit(options.providers)
        config = config_of(source, options)
        require_core_ml()
        opened = OpenedPackage.of(source)
        unit = asked or opened.unit
        program = NativeProgram(compiled_package(source), list(opened.signatures), unit)
        return StaticModel(program, opened.layout, config)

    def compute(self, providers: Sequence[str]) -> str | None:
        """Packages are laid out for the Neural Engine, or by default for the GPU."""
        require_core_ml()
        return ANE if _unit(providers) == ANE else None

    def devices(self, options: RuntimeOptions) -> list[Device]:
        try:
            require_core_ml()
        except DeviceError as error:
            return [Device(self.name, None, None, "", fault=str(error))]
        return compute_devices(self.name)

    def placements(self, source: Bundle, options: RuntimeOptions) -> list[FunctionPlacement]:
        """Returns Core ML's own plan for the unit that the options name, or the package's."""
        require_core_ml()
        unit = _unit(options.providers) or OpenedPackage.of(source).unit
        return summarize(read_plan(compiled_package(source), unit), unit)


def _unit(providers: Sequence[str]) -> str | None:
    """The name that was given. Raises UsageError."""
    if not providers:
        return None
    names = [name.lower() for name in providers]
    if len(names) > 1 or names[0] not in UNITS:
        raise UsageError(
            f"coreml has no device {', '.join(names)}",
            remedy=f"Choose one of {', '.join(UNITS)}; the processor takes part in all of them.",
        )
    return names[0]
