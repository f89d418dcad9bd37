"""openvino, where it is installed, without what it would report, and the NPU of Intel machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from edge_spec.core.entry_points import quiet_import
from edge_spec.errors import DeviceError, MissingDependencyError
from edge_spec.models.devices import NPU

_TELEMETRY = "openvino_telemetry"
_INSTALL = 'Run: pip install "edge-spec[openvino]".'


def import_openvino() -> Any:
    """Returns the module. Importing it would send an event to Google Analytics where the user has
    not declined; without its module `openvino_telemetry`, which is kept from loading in this
    process, it takes a stub of its own that sends nothing. Raises MissingDependencyError."""
    sys.modules.setdefault(_TELEMETRY, None)  # type: ignore[arg-type]  # importing it fails
    try:
        with quiet_import():
            import openvino
    except ModuleNotFoundError:
        raise MissingDependencyError("openvino is not installed", remedy=_INSTALL) from None
    except ImportError as error:
        raise MissingDependencyError(
            f"openvino is installed and does not load: {error}", remedy=_INSTALL
        ) from error
    if not hasattr(openvino, "Core"):
        raise MissingDependencyError("openvino is installed in part", remedy=_INSTALL)
    return openvino


@cache
def core() -> Any:
    """Returns openvino's Core, one a process: each loads the plugins again. Raises as above."""
    return import_openvino().Core()


def told(core: Any, device: str, name: str) -> Any:
    """Returns a property of a device; None where its plugin does not have it."""
    with suppress(RuntimeError):
        return core.get_property(device, name)
    return None


def reason(error: Exception) -> str:
    """Return what an error says, without the places in the library's source."""
    lines = [line.strip() for line in str(error).splitlines() if " at src/" not in line]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    return (told or [type(error).__name__])[0]


_PLUGIN = "NPU"
# NPUW is the part of OpenVINO's NPU plugin that language models pass. Left to itself it cuts a
# graph into parts, which on a CPU gave some of our graphs wrong scores, or none.
_NPUW = {"NPU_USE_NPUW": "YES", "NPUW_ONLINE_PIPELINE": "NONE", "CACHE_MODE": "OPTIMIZE_SPEED"}


@dataclass(frozen=True)
class NpuDevice:
    """Describes the device that graphs are compiled for.

    core: OpenVINO's. runs_on: NPUW's device. total_bytes: what it may map, None where it is not
    told.
    """

    core: Any
    openvino: str
    runs_on: str
    description: str
    driver: str
    total_bytes: int | None = None

    @property
    def options(self) -> Mapping[str, str]:
        """Returns the options that graphs are compiled and read with."""
        return {**_NPUW, "NPUW_DEVICES": self.runs_on}

    @property
    def key(self) -> dict[str, Any]:
        """Returns what compiled graphs depend on, beside the bundle."""
        told = {"openvino": self.openvino, "device": self.description, "driver": self.driver}
        return {**told, "options": dict(self.options)}

    def compile(self, path: str) -> Any:
        """Returns OpenVINO's CompiledModel. Raises RuntimeError."""
        return self.core.compile_model(path, _PLUGIN, dict(self.options))

    def load(self, content: bytes) -> Any:
        """Returns what was compiled and exported before. Raises RuntimeError."""
        return self.core.import_model(content, _PLUGIN, dict(self.options))


def is_npu(providers: Sequence[str]) -> bool:
    return [name.lower() for name in providers] == [NPU]


def find_npu() -> NpuDevice:
    """Raises DeviceError where there is none, MissingDependencyError."""
    here = core()
    if _PLUGIN not in here.available_devices:
        raise DeviceError(
            "openvino finds no NPU on this machine",
            remedy="Install the driver of Intel's NPU, or choose another --device.",
        )
    version = str(import_openvino().__version__)
    name = str(here.get_property(_PLUGIN, "FULL_DEVICE_NAME"))
    driver = str(told(here, _PLUGIN, "NPU_DRIVER_VERSION"))
    total = told(here, _PLUGIN, "NPU_DEVICE_TOTAL_MEM_SIZE")
    return NpuDevice(here, version, _PLUGIN, name, driver, int(total) if total else None)
