"""The devices of OpenVINO's plugins, by the names that `--device` takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from edge_spec.errors import DeviceError, UsageError
from edge_spec.fitting.devices import CPU, GPU, NPU, Device, processor
from edge_spec.runtimes.openvino.library import told

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
