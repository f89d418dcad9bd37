"""Opens ONNX bundles in OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, UnsupportedModelError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, GPU, NPU, Device, processor
from edge_spec.runtimes.openvino.library import core, find_npu, is_npu, told

if TYPE_CHECKING:
    from edge_spec.models.devices import Memory
    from edge_spec.runtimes.openvino.model import OpenVinoModel
    from edge_spec.runtimes.static.session import StaticModel


_RUNTIME = "openvino"
_KINDS = {"CPU": CPU, "GPU": GPU, "NPU": NPU}  # plugins that compute by themselves


def choose(core: Any, wanted: Sequence[str]) -> str:
    """Returns the plugin's name of a device, such as "GPU.1" for "gpu:1"; no name stands for the
    CPU. Raises UsageError, which lists the devices, DeviceError where none is found."""
    if len(wanted) > 1:
        raise UsageError(
            f"openvino puts a model on one device, not on {' and '.join(wanted)}",
            remedy="Name one of them.",
        )
    found = names(core)
    name = wanted[0].lower().replace(".", ":").removesuffix(":0") if wanted else CPU
    if name not in found:
        raise UsageError(
            f"openvino has no device {name!r} here",
            remedy=f"There are: {', '.join(found)}; edge-spec devices says more.",
        )
    return found[name]


def names(core: Any) -> dict[str, str]:
    """Returns the plugins' names by ours: "gpu" is the first, "gpu:1" the second. Raises
    DeviceError."""
    try:
        devices = core.available_devices
    except RuntimeError as error:  # of a driver
        raise DeviceError(
            f"openvino cannot list its devices: {error}",
            remedy="Update the driver, or choose another --runtime.",
        ) from error
    known = (device for device in devices if device.partition(".")[0] in _KINDS)
    return {each.lower().replace(".", ":").removesuffix(":0"): each for each in known}


def listed(core: Any) -> Iterator[Device]:
    """Yields what `edge-spec devices` shows. Raises DeviceError."""
    for name, device in names(core).items():
        kind = _KINDS[device.partition(".")[0]]
        full_name = str(told(core, device, "FULL_DEVICE_NAME") or device)
        if kind == CPU:
            yield replace(processor(_RUNTIME), description=full_name)
            continue
        total = told(core, device, f"{device.partition('.')[0]}_DEVICE_TOTAL_MEM_SIZE")
        shares = "INTEGRATED" in str(told(core, device, "DEVICE_TYPE"))
        total_bytes = int(total) if total else None
        yield Device(_RUNTIME, name, kind, full_name, total_bytes, shares_memory=shares)


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
        return list(listed(core()))

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
