"""The openvino library, kept from reporting to anyone, and the devices that it computes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from edge_spec.errors import DeviceError
from edge_spec.runtimes.libraries import import_library

_TELEMETRY = "openvino_telemetry"
_INSTALL = 'Run: pip install "edge-spec[openvino]".'


def import_openvino() -> Any:
    """Returns the module. Importing it would send an event to Google Analytics where the user has
    not declined; without its module `openvino_telemetry`, which is kept from loading in this
    process, it takes a stub of its own that sends nothing. Raises MissingDependencyError."""
    sys.modules.setdefault(_TELEMETRY, None)  # type: ignore[arg-type]  # importing it fails
    return import_library("openvino", "Core", _INSTALL)


@cache
def core() -> Any:
    """Returns openvino's Core, one a process: each loads the plugins again. Raises as above."""
    return import_openvino().Core()


def property_of(core: Any, device: str, name: str) -> Any:
    """Return a property of a device; None where its plugin does not have it."""
    with suppress(RuntimeError):
        return core.get_property(device, name)
    return None


def reason(error: Exception) -> str:
    """Return what an error says, without the places in the library's source."""
    lines = [line.strip() for line in str(error).splitlines() if " at src/" not in line]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    return (told or [type(error).__name__])[0]


_NPU = "NPU"
_CPU = "CPU"
# NPUW is the part of OpenVINO's NPU plugin that language models pass. Left to itself it cuts a
# graph into parts, which on a CPU gave some of our graphs wrong scores, or none.
_NPUW = {"NPU_USE_NPUW": "YES", "NPUW_ONLINE_PIPELINE": "NONE", "CACHE_MODE": "OPTIMIZE_SPEED"}
_LATENCY = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
IN_FLOAT32 = {
    "INFERENCE_PRECISION_HINT": "f32",  # else the CPU rounds to bfloat16 where it has that
    # Else it rounds what a matrix is multiplied with to int8. That is faster, but then the last
    # bits, which depend on where a row stands in its pass, move scores by whole steps of it.
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


@dataclass(frozen=True)
class OpenVinoDevice:
    """A device that graphs are compiled for.

    core: OpenVINO's. plugin: OpenVINO's name of the device, such as "GPU.1". options: that graphs
    are compiled and read with.
    """

    core: Any
    openvino: str
    plugin: str
    description: str
    driver: str
    options: Mapping[str, Any]

    @property
    def is_cpu(self) -> bool:
        return self.plugin == _CPU

    @property
    def name(self) -> str:
        """Return the name that users type."""
        return short_name(self.plugin)

    @property
    def key(self) -> dict[str, Any]:
        """Return what compiled graphs depend on, beside the bundle."""
        known = {"openvino": self.openvino, "device": self.description, "driver": self.driver}
        return {**known, "options": dict(self.options)}

    def compile(self, path: str) -> Any:
        """Return OpenVINO's CompiledModel. Raises RuntimeError."""
        return self.core.compile_model(path, self.plugin, dict(self.options))

    def load(self, content: bytes) -> Any:
        """Return what was compiled and exported before. Raises RuntimeError."""
        return self.core.import_model(content, self.plugin, dict(self.options))


def short_name(plugin: str) -> str:
    """Return the name that users type for a plugin's device: "gpu:1" for "GPU.1"."""
    return plugin.lower().replace(".", ":").removesuffix(":0")


def find_device(plugin: str, threads: int | None = None) -> OpenVinoDevice:
    """Raises DeviceError where there is none, MissingDependencyError."""
    here = core()
    if plugin == _NPU and plugin not in here.available_devices:
        raise DeviceError(
            "openvino finds no NPU on this machine",
            remedy="Install the driver of Intel's NPU, or choose another --device.",
        )
    options: dict[str, Any] = dict(_LATENCY)
    if plugin == _NPU:
        options = npu_options(plugin)
    elif plugin == _CPU:
        # Without pinning: other models, and programs, run on the same cores.
        options |= {**IN_FLOAT32, "ENABLE_CPU_PINNING": False}
        options |= {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    version = str(import_openvino().__version__)
    name = str(property_of(here, plugin, "FULL_DEVICE_NAME"))
    driver = str(property_of(here, plugin, "NPU_DRIVER_VERSION"))
    return OpenVinoDevice(here, version, plugin, name, driver, options)


def npu_options(runs_on: str) -> dict[str, Any]:
    """Return the options of the NPU's plugin. runs_on: NPUW's device."""
    return {**_NPUW, "NPUW_DEVICES": runs_on}
