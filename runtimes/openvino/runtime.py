"""Opens ONNX bundles in OpenVINO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_spec.core.model import RuntimeOptions
from edge_spec.models.bundle import Bundle
from edge_spec.placement.devices import Device
from edge_spec.runtimes.openvino.devices import choose, listed
from edge_spec.runtimes.openvino.library import core

if TYPE_CHECKING:
    from edge_spec.placement.memory import Memory
    from edge_spec.runtimes.openvino.model import OpenVinoModel


class OpenVinoRuntime:
    name = "openvino"
    reads = "onnx"

    def open(self, source: Bundle, options: RuntimeOptions) -> OpenVinoModel:
        """Raises UsageError, UnsupportedModelError, BundleError, DeviceError."""
        options.require_only(self.name, "threads", "providers", "context_length")
        from edge_spec.runtimes.openvino.model import OpenVinoModel

        return OpenVinoModel(source, options, choose(core(), options.providers))

    def require_devices(self, providers: Sequence[str]) -> None:
        """Raises as DeviceScreeningRuntime does."""
        choose(core(), providers)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return list(listed(core()))

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.openvino.memory import bundle_memory

        return bundle_memory(source, options, num_tokens)
