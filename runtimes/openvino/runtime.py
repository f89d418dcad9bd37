"""Opens ONNX bundles in OpenVINO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.fitting.devices import Device
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.openvino.devices import choose, listed
from edge_spec.runtimes.openvino.library import core
from edge_spec.runtimes.openvino.npu_device import find_npu, is_npu, listed_stand_in

if TYPE_CHECKING:
    from edge_spec.fitting.devices import Memory
    from edge_spec.runtimes.openvino.model import OpenVinoModel
    from edge_spec.runtimes.static.model import StaticModel

STATIC = "onnx-static"  # bundles of graphs whose shapes are fixed, for the NPU


class OpenVinoRuntime:
    name = "openvino"
    reads = "onnx"
    also_reads = (STATIC,)

    def open(self, source: Bundle, options: RuntimeOptions) -> OpenVinoModel | StaticModel:
        """Raises UsageError, UnsupportedModelError, BundleError, DeviceError."""
        options.require_only(self.name, "threads", "providers", "context_length")
        _require_form(source, options)
        if is_npu(options.providers):
            from edge_spec.runtimes.openvino.npu_model import open_for_npu

            return open_for_npu(source, options, find_npu())
        from edge_spec.runtimes.openvino.model import OpenVinoModel

        self.require_config(source.config, source.path)
        return OpenVinoModel(source, options, choose(core(), options.providers))

    def format_on(self, providers: Sequence[str]) -> str:
        return STATIC if is_npu(providers) else self.reads

    def require_devices(self, providers: Sequence[str]) -> None:
        """Raises as DeviceScreeningRuntime does."""
        if is_npu(providers):
            find_npu()
        else:
            choose(core(), providers)

    def require_config(self, config: ModelConfig, path: Path) -> None:
        """Raises UnsupportedModelError."""
        lacked = config.unlike_layers
        if config.encoder is not None:
            lacked = "an encoder"
        elif config.convolving:
            lacked = "short convolutions"
        if lacked is not None:
            raise UnsupportedModelError(
                f"{path} has {lacked}, which openvino is not given", remedy="Choose --runtime ort."
            )

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return [*listed(core()), *listed_stand_in()]

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        """Raises UsageError for a bundle of another form than the device takes."""
        _require_form(source, options)
        from edge_spec.runtimes.openvino.memory import bundle_memory, npu_memory

        forecast = npu_memory if source.manifest.format == STATIC else bundle_memory
        return forecast(source, options, num_tokens)


def _require_form(source: Bundle, options: RuntimeOptions) -> None:
    """Raises UsageError: the NPU takes graphs of fixed shapes, the other plugins do not."""
    format = source.manifest.format
    if is_npu(options.providers) and format != STATIC:
        raise UsageError(
            f"the NPU takes graphs of fixed shapes, and {source.path} is a bundle of format "
            f"{format}",
            remedy=f"Export the model with --format {STATIC}.",
        )
    if format == STATIC and not is_npu(options.providers):
        raise UsageError(
            f"openvino runs {source.path}, whose shapes are fixed, on the npu only",
            remedy="Choose --device npu, --runtime ort, or a bundle of format onnx.",
        )
