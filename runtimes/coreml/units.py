"""Names what Core ML computes on, as `--device` takes it."""

from __future__ import annotations

from collections.abc import Mapping

from edge_spec.fitting.devices import CPU, GPU

ANE, ALL = "ane", "all"
UNITS: Mapping[str, str] = {CPU: "CPU_ONLY", GPU: "CPU_AND_GPU", ANE: "CPU_AND_NE", ALL: "ALL"}
# Classes of devices, as coremltools calls them.
CLASSES: Mapping[str, str] = {
    "MLCPUComputeDevice": CPU,
    "MLGPUComputeDevice": GPU,
    "MLNeuralEngineComputeDevice": ANE,
}
