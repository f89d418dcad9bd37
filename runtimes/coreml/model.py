"""Opens bundles with a Core ML package: on Core ML, or in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Capabilities, RuntimeOptions
from edge_spec.errors import DeviceError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.placement.devices import GPU, Device
from edge_spec.runtimes.coreml.library import require_core_ml
from edge_spec.runtimes.coreml.package import (
    FORMAT,
    compute_of,
    package_of,
    read_specification,
)
from edge_spec.runtimes.coreml.signatures import signatures_of_spec
from edge_spec.runtimes.coreml.units import ANE, UNITS
from edge_spec.runtimes.static.layout import Layout, Signature, read_layout

if TYPE_CHECKING:
    from edge_spec.placement.operations import FunctionPlacement
    from edge_spec.runtimes.static.program import Program
    from edge_spec.runtimes.static.session import StaticSession


class CoreMlModel:
    """A program and its layout; sessions share the program."""

    def __init__(self, program: Program, layout: Layout, config: ModelConfig) -> None:
        self.config = config
        self.capabilities = Capabilities(
            max_rows=layout.max_rows,
            trees=True,
            rollback=True,
            hidden_states=layout.hidden_states,
        )
        self._program: Program | None = program
        self._layout = layout

    def open_session(self) -> StaticSession:
        from edge_spec.runtimes.static.session import StaticSession

        assert self._program is not None, "the model is closed"
        return StaticSession(self._program, self._layout, self.config.context_length)

    def close(self) -> None:
        self._program = None


@dataclass(frozen=True)
class OpenedPackage:
    """What a package says of itself."""

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
        """That it was laid out for."""
        return compute_of(self.specification) or GPU


class CoreMlRuntime:
    name = "coreml"
    reads = FORMAT

    def open(self, source: Bundle, options: RuntimeOptions) -> CoreMlModel:
        """Raises DeviceError on other systems than macOS, UsageError, BundleError."""
        # Threads are Core ML's own matter; a draft is given its target's.
        options.require_only(self.name, "threads", "providers", "context_length")
        asked = _unit(options.providers)
        config = config_of(source, options)
        require_core_ml()
        from edge_spec.runtimes.coreml.native import NativeProgram, compiled_package

        opened = OpenedPackage.of(source)
        unit = asked or opened.unit
        program = NativeProgram(compiled_package(source), list(opened.signatures), unit)
        return CoreMlModel(program, opened.layout, config)

    def compute(self, providers: Sequence[str]) -> str | None:
        """Packages are laid out for the Neural Engine, or by default for the GPU."""
        require_core_ml()
        return ANE if _unit(providers) == ANE else None

    def devices(self, options: RuntimeOptions) -> list[Device]:
        try:
            require_core_ml()
        except DeviceError as error:
            return [Device(self.name, None, None, "", fault=str(error))]
        from edge_spec.runtimes.coreml.native import compute_devices

        return compute_devices(self.name)

    def placements(self, source: Bundle, options: RuntimeOptions) -> list[FunctionPlacement]:
        """Returns Core ML's own plan for the unit that the options name, or the package's."""
        require_core_ml()
        from edge_spec.runtimes.coreml.native import compiled_package
        from edge_spec.runtimes.coreml.unit_plan import read_plan, summarize

        unit = _unit(options.providers) or OpenedPackage.of(source).unit
        return summarize(read_plan(compiled_package(source), unit), unit)


def config_of(bundle: Bundle, options: RuntimeOptions) -> ModelConfig:
    """Returns the configuration with the context that was asked for. Raises UsageError where the
    cache does not hold it."""
    config, wanted = bundle.config, options.context_length
    if wanted is None:
        return config
    if wanted > config.context_length:
        raise UsageError(
            f"the cache of {bundle.path} holds {config.context_length} tokens, not {wanted}",
            remedy=f"Choose a smaller --context, or export the model with --context {wanted}.",
        )
    return replace(config, context_length=wanted)


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
