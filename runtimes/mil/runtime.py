"""Opens bundles with a Core ML package in numpy."""

from __future__ import annotations

from functools import partial

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import UsageError
from edge_spec.fitting.devices import CPU, Device, processor
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.coreml.library import import_coremltools
from edge_spec.runtimes.coreml.model import OpenedPackage
from edge_spec.runtimes.coreml.package import FORMAT, read_function
from edge_spec.runtimes.static.model import StaticModel, config_of


class MilRuntime:
    """The same packages in numpy, on any system: slow, for checks."""

    name = "mil"
    reads = FORMAT

    def open(self, source: Bundle, options: RuntimeOptions) -> StaticModel:
        """Raises UsageError, BundleError; a session, UnsupportedModelError for operations that
        are not known."""
        # It is numpy, whatever threads are asked for.
        options.require_only(self.name, "threads", "providers", "context_length")
        others = [name for name in options.providers if name.lower() != CPU]
        if others:
            raise UsageError(
                f"{self.name} has no device {', '.join(others)}",
                remedy="It evaluates packages on the cpu; --runtime coreml runs them on others.",
            )
        config = config_of(source, options)
        import_coremltools()
        from edge_spec.runtimes.mil.program import NumpyProgram

        opened = OpenedPackage.of(source)
        load = partial(read_function, opened.package, opened.specification)
        return StaticModel(NumpyProgram(opened.signatures, load), opened.layout, config)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        import_coremltools()
        return [processor(self.name)]
