"""Opens bundles of fixed shapes in OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.errors import DeviceError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, GPU, NPU, Device, processor
from edge_spec.runtimes.openvino.library import (
    OpenVinoDevice,
    core,
    find_device,
    property_of,
    short_name,
)

if TYPE_CHECKING:
    from edge_spec.models.devices import Memory
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
    return {short_name(each): each for each in known}


def listed(core: Any) -> Iterator[Device]:
    """Yields what `edge-spec devices` shows. Raises DeviceError."""
    for name, device in names(core).items():
        kind = _KINDS[device.partition(".")[0]]
        full_name = str(property_of(core, device, "FULL_DEVICE_NAME") or device)
        if kind == CPU:
            yield replace(processor(_RUNTIME), description=full_name)
            continue
        total = property_of(core, device, f"{device.partition('.')[0]}_DEVICE_TOTAL_MEM_SIZE")
        shares = "INTEGRATED" in str(property_of(core, device, "DEVICE_TYPE"))
        total_bytes = int(total) if total else None
        yield Device(_RUNTIME, name, kind, full_name, total_bytes, shares_memory=shares)


class OpenVinoRuntime(Runtime):
    name = "openvino"
    reads = "onnx-static"  # bundles of graphs whose shapes are fixed

    def open(self, source: Bundle, options: RuntimeOptions) -> StaticModel:
        """Raises UsageError, UnsupportedModelError, BundleError, DeviceError."""
        from edge_spec.runtimes.openvino.model import open_static

        options.require_only(self.name, "threads", "providers", "context_length")
        return open_static(source, options, _device(options.providers, options.threads))

    def require_devices(self, providers: Sequence[str]) -> None:
        """See `edge_spec.core.model.Runtime`."""
        _device(providers)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return list(listed(core()))

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.openvino.model import static_memory

        return static_memory(source, options, num_tokens)


def _device(providers: Sequence[str], threads: int | None = None) -> OpenVinoDevice:
    """Raises UsageError, DeviceError."""
    if [name.lower() for name in providers] == [NPU]:
        return find_device("NPU")
    return find_device(choose(core(), providers), threads)
