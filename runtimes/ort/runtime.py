"""The onnxruntime runtime. It imports only onnxruntime, so that a missing one is reported before a
model is converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edge_spec.core.model import Runtime
from edge_spec.runtimes.ort.library import import_onnxruntime

if TYPE_CHECKING:
    from edge_spec.core.heads import StoredStep, TrainedHead
    from edge_spec.core.model import RuntimeOptions
    from edge_spec.models.bundle import Bundle
    from edge_spec.models.devices import Device, Memory
    from edge_spec.runtimes.ort.growing import GrowingModel
    from edge_spec.runtimes.ort.model import OrtModel
    from edge_spec.runtimes.static.session import StaticModel


STATIC = "onnx-static"  # bundles with fixed shapes
COMPILED = "qnn"  # bundles compiled for an NPU


class OrtRuntime(Runtime):
    name = "ort"
    reads = "onnx"
    also_reads = (STATIC, COMPILED)

    def __init__(self) -> None:
        import_onnxruntime()

    def kernels(self) -> str:
        from edge_spec.runtimes.ort import rows

        return rows.wanted()

    def open(
        self, source: Bundle, options: RuntimeOptions
    ) -> OrtModel | GrowingModel | StaticModel:
        """Open a bundle. On devices, a few scores are first compared with the CPU's, which loads
        the model, too. Raises UsageError, BundleError, DeviceError."""
        from edge_spec.runtimes.ort.opening import open_bundle

        options.require_only(self.name, "threads", "providers", "context_length")
        return open_bundle(source, options)

    def require_devices(self, providers: Sequence[str]) -> None:
        from edge_spec.runtimes.ort.opening import choose_device

        choose_device(providers)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        from edge_spec.runtimes.ort.listing import listed

        return list(listed())

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.ort.memory import bundle_memory, static_memory

        is_static = source.manifest.format in self.also_reads
        return (static_memory if is_static else bundle_memory)(source, options, num_tokens)

    def open_head(self, stored: StoredStep, head: TrainedHead, threads: int | None) -> Any:
        """Open a head on the CPU; see ComputesHeads."""
        from edge_spec.core.heads import AssistantHead, MedusaHead
        from edge_spec.runtimes.ort.heads import OrtLayers, OrtMedusaStep

        if isinstance(head, MedusaHead):
            return OrtMedusaStep(stored, threads)
        assert not isinstance(head, AssistantHead)  # numpy computes it
        return OrtLayers(stored, head, threads)
