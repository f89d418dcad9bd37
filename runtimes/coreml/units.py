"""Names what Core ML computes on, as `--device` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edge_spec.fitting.devices import CPU, GPU

ANE, ALL = "ane", "all"
UNITS: Mapping[str, str] = MappingProxyType(  # names for --device -> coremltools' compute units
    {CPU: "CPU_ONLY", GPU: "CPU_AND_GPU", ANE: "CPU_AND_NE", ALL: "ALL"}
)
# Classes of devices, as coremltools calls them.
CLASSES: Mapping[str, str] = MappingProxyType(
    {"MLCPUComputeDevice": CPU, "MLGPUComputeDevice": GPU, "MLNeuralEngineComputeDevice": ANE}
)
