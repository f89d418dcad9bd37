"""The OpenVINO runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, Device, processor
from edge_spec.runtimes.openvino.library import KINDS, core, find_device, plugins, property_of

if TYPE_CHECKING:
    from edge_spec.models.devices import Memory
    from edge_spec.runtimes.static.session import StaticModel


class OpenVinoRuntime(Runtime):
    name = "openvino"
    reads = "onnx-static"  # bundles of fixed shapes

    def open(self, source: Bundle, options: RuntimeOptions) -> StaticModel:
        """Raises UsageError, UnsupportedModelError, BundleError, DeviceError."""
        from edge_spec.runtimes.openvino.model import open_static

        options.require_only(self.name, "threads", "providers", "context_length")
        return open_static(source, options, find_device(options.providers, options.threads))

    def require_devices(self, providers: Sequence[str]) -> None:
        find_device(providers)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return list(_listed(core()))

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.openvino.model import static_memory

        return static_memory(source, options, num_tokens)


def _listed(core: Any) -> Iterator[Device]:
    for name, device in plugins(core).items():
        plugin = device.partition(".")[0]
        full_name = str(property_of(core, device, "FULL_DEVICE_NAME") or device)
        if KINDS[plugin] == CPU:
            yield replace(processor(OpenVinoRuntime.name), description=full_name)
            continue
        total = property_of(core, device, f"{plugin}_DEVICE_TOTAL_MEM_SIZE")
        shares = "INTEGRATED" in str(property_of(core, device, "DEVICE_TYPE"))
        yield Device(
            OpenVinoRuntime.name,
            name,
            KINDS[plugin],
            full_name,
            int(total) if total else None,
            shares_memory=shares,
        )
