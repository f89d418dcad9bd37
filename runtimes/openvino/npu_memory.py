"""Forecasts the memory of a static bundle on the NPU, from its manifest alone.

Measured with OpenVINO 2026.4 on an AMD EPYC (Zen 4), the processor in the NPU's place, with all
four functions of the demo model: 4.8 GB for float16, 1.5 GB for int8 and 1.2 GB for int4, of which
this says 4.4, 1.5 and 1.1 GB; compiling them took up to twice as much. On an NPU nothing was
measured: each function has its own copy of the weights there, as `require_npu_memory` counts them.
"""

from __future__ import annotations

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceMemoryError
from edge_spec.fitting.devices import NPU
from edge_spec.fitting.memory import Memory
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.openvino.memory import LIBRARY_BYTES
from edge_spec.runtimes.openvino.npu_device import NpuDevice, is_stand_in
from edge_spec.runtimes.static.memory import session_bytes
from edge_spec.runtimes.static.onnx_graphs import DATA_FILE

# Of the stored bytes, in one function on the processor: two of float32 for one of float16.
_COPIED = {"fp32": 2.0, "fp16": 4.0}
_COPIED_INTEGERS = 2.6


def npu_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecasts the same for any number of tokens: a session has all of its slots at once."""
    states, scores = session_bytes(bundle, options, num_tokens)
    weights = weights_on_npu(bundle)
    if is_stand_in():
        copied = weights * _COPIED.get(bundle.manifest.quantization, _COPIED_INTEGERS)
        return Memory(int(copied), states, scores, LIBRARY_BYTES)
    return Memory(0, states, 0, LIBRARY_BYTES, on_devices={NPU: weights + scores})


def weights_on_npu(bundle: Bundle) -> int:
    """Returns bytes: each function's compiled graph has its own weights."""
    num_functions = sum(name.endswith(".onnx") for name in bundle.manifest.files)
    return num_functions * bundle.manifest.files[DATA_FILE].num_bytes


def require_npu_memory(bundle: Bundle, device: NpuDevice) -> None:
    """Raises DeviceMemoryError for more than the NPU may map."""
    needed = weights_on_npu(bundle)
    if device.total_bytes is not None and needed > device.total_bytes:
        weights = bundle.manifest.files[DATA_FILE].num_bytes
        raise DeviceMemoryError(
            f"{bundle.path} takes {needed / 1e6:.0f} MB on the NPU ({needed // weights} functions "
            f"with {weights / 1e6:.0f} MB of weights each), which may map "
            f"{device.total_bytes / 1e6:.0f} MB",
            remedy="Choose another --device, or a smaller model.",
        )
