"""coremltools, where it is installed, and the system that Core ML needs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

from edge_spec.core.entry_points import quiet_import
from edge_spec.errors import DeviceError, MissingDependencyError
from edge_spec.fitting.devices import CPU, GPU

_MIN_MACOS = 15  # states and several functions in a package


def import_coremltools() -> Any:
    """Raises MissingDependencyError."""
    try:
        with quiet_import():
            import coremltools
    except ImportError:
        raise MissingDependencyError(
            "coremltools is not installed", remedy='Run: pip install "edge-spec[coreml]".'
        ) from None
    return coremltools


def this_system() -> tuple[str, str]:
    """Python's name of it, and the version of macOS, "" elsewhere."""
    return sys.platform, platform.mac_ver()[0]


def require_core_ml() -> None:
    """Raises DeviceError where Core ML cannot run a package."""
    system, macos = this_system()
    remedy = "Here, --runtime ort or llamacpp runs the model as it was published."
    if system != "darwin":
        raise DeviceError(f"Core ML runs on macOS {_MIN_MACOS} or newer only", remedy=remedy)
    if int(macos.partition(".")[0]) < _MIN_MACOS:
        raise DeviceError(
            f"this is macOS {macos}, and Core ML runs models with a state on {_MIN_MACOS} or newer",
            remedy=f"Update macOS. {remedy}",
        )


ANE, ALL = "ane", "all"
UNITS: Mapping[str, str] = {CPU: "CPU_ONLY", GPU: "CPU_AND_GPU", ANE: "CPU_AND_NE", ALL: "ALL"}
# Classes of devices, as coremltools calls them.
CLASSES: Mapping[str, str] = {
    "MLCPUComputeDevice": CPU,
    "MLGPUComputeDevice": GPU,
    "MLNeuralEngineComputeDevice": ANE,
}
