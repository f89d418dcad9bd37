"""The openvino library, without its telemetry, and its devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from edge_spec.errors import DeviceError, install
from edge_spec.models.devices import CPU, GPU, NPU
from edge_spec.runtimes.libraries import import_library, pick_device

_TELEMETRY = "openvino_telemetry"
_INSTALL = f"{install('openvino')}."


def import_openvino() -> Any:
    """Import openvino without telemetry. Raises MissingDependencyError.

    It would send an event to Google Analytics. If `openvino_telemetry` cannot be imported, it uses
    a stub that sends nothing.
    """
    sys.modules.setdefault(_TELEMETRY, None)  # type: ignore[arg-type]  # importing it fails
    return import_library("openvino", "Core", _INSTALL)


@cache
def core() -> Any:
    """Return openvino's Core, one per process: each loads all plugins. Raises as
    `import_openvino`."""
    return import_openvino().Core()


def property_of(core: Any, device: str, name: str) -> Any:
    """Return a device's property; None if its plugin lacks it."""
    with suppress(RuntimeError):
        return core.get_property(device, name)
    return None


def reason(error: Exception) -> str:
    """Return an error's text without locations in the library's source."""
    lines = [line.strip() for line in str(error).splitlines() if " at src/" not in line]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    return (told or [type(error).__name__])[0]


KINDS = {"CPU": CPU, "GPU": GPU, "NPU": NPU}  # plugins of actual devices
# NPUW is the NPU plugin's part for language models. By default it splits graphs, which on a CPU
# gave some of ours wrong scores, or none.
_NPUW = {"NPU_USE_NPUW": "YES", "NPUW_ONLINE_PIPELINE": "NONE", "CACHE_MODE": "OPTIMIZE_SPEED"}
_LATENCY = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
IN_FLOAT32 = {
    "INFERENCE_PRECISION_HINT": "f32",  # else a CPU with bfloat16 rounds to it
    # Else it rounds a matrix's inputs to int8. That is faster, but last bits, which depend on a
    # row's place in its pass, then move scores by whole steps.
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


@dataclass(frozen=True)
class OpenVinoDevice:
    """A device to compile graphs for.

    core: OpenVINO's. name: the user's. plugin: OpenVINO's name, such as "GPU.1". options: to
    compile and load graphs with.
    """

    core: Any
    name: str
    plugin: str
    options: Mapping[str, Any]

    @property
    def key(self) -> dict[str, Any]:
        """Return what compiled graphs depend on besides the bundle."""
        return {
            "openvino": str(import_openvino().__version__),
            "device": str(property_of(self.core, self.plugin, "FULL_DEVICE_NAME")),
            "driver": str(property_of(self.core, self.plugin, "NPU_DRIVER_VERSION")),
            "options": dict(self.options),
        }

    def compile(self, path: str) -> Any:
        """Return OpenVINO's CompiledModel. Raises RuntimeError."""
        return self.core.compile_model(path, self.plugin, dict(self.options))

    def load(self, content: bytes) -> Any:
        """Return an exported CompiledModel. Raises RuntimeError."""
        return self.core.import_model(content, self.plugin, dict(self.options))


def plugins(core: Any) -> dict[str, str]:
    """Return OpenVINO's device names by ours: "gpu" is the first, "gpu:1" the second. Raises
    DeviceError."""
    try:
        devices = core.available_devices
    except RuntimeError as error:  # from a driver
        raise DeviceError(
            f"openvino cannot list its devices: {error}",
            remedy="Update the driver, or choose another --runtime.",
        ) from error
    known = (device for device in devices if device.partition(".")[0] in KINDS)
    return {_short(each): each for each in known}


def _short(name: str) -> str:
    return name.lower().replace(".", ":").removesuffix(":0")


def find_device(wanted: Sequence[str], threads: int | None = None) -> OpenVinoDevice:
    """Return a device, by default the CPU. Raises UsageError, which lists the devices, DeviceError
    without an NPU, MissingDependencyError."""
    here, names = core(), [_short(name) for name in wanted]
    found = plugins(here)
    if names == [NPU] and NPU not in found:
        raise DeviceError(
            "openvino finds no NPU on this machine",
            remedy="Install the driver of Intel's NPU, or choose another --device.",
        )
    name = pick_device("openvino", names, found) or CPU
    options: dict[str, Any] = dict(_LATENCY)
    if name == NPU:
        options = npu_options("NPU")
    elif name == CPU:
        # No pinning, since other models and programs use the same cores.
        options |= {**IN_FLOAT32, "ENABLE_CPU_PINNING": False}
        options |= {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    return OpenVinoDevice(here, name, found[name], options)


def npu_options(runs_on: str) -> dict[str, Any]:
    """Return the NPU plugin's options. runs_on: NPUW's device."""
    return {**_NPUW, "NPUW_DEVICES": runs_on}
