"""Forecasts the memory of a static bundle in OpenVINO, from its manifest alone. Nothing was
measured on a GPU or an NPU."""

from __future__ import annotations

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceMemoryError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, Memory
from edge_spec.runtimes.openvino.library import OpenVinoDevice
from edge_spec.runtimes.static.session import session_bytes

DATA_FILE = "model.onnx.data"
LIBRARY_BYTES = 90_000_000  # code and tables, once they are in use


def static_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecast the same for any number of tokens: a session has all of its slots at once."""
    states, scores = session_bytes(bundle, options, num_tokens)
    weights = _function_weights(bundle)
    device = options.providers[0].lower() if options.providers else CPU
    if device == CPU:
        return Memory(weights, states, scores, LIBRARY_BYTES)
    return Memory(0, states, 0, LIBRARY_BYTES, on_devices={device: weights + scores})


def _function_weights(bundle: Bundle) -> int:
    """Return bytes: each function's compiled graph has its own weights."""
    num_functions = sum(name.endswith(".onnx") for name in bundle.manifest.files)
    return num_functions * bundle.manifest.files[DATA_FILE].num_bytes


def require_npu_memory(bundle: Bundle, device: OpenVinoDevice) -> None:
    """Raises DeviceMemoryError for more than the NPU may map."""
    needed = _function_weights(bundle)
    if device.total_bytes is not None and needed > device.total_bytes:
        weights = bundle.manifest.files[DATA_FILE].num_bytes
        raise DeviceMemoryError(
            f"{bundle.path} takes {needed / 1e6:.0f} MB on the NPU ({needed // weights} functions "
            f"with {weights / 1e6:.0f} MB of weights each), which may map "
            f"{device.total_bytes / 1e6:.0f} MB",
            remedy="Choose another --device, or a smaller model.",
        )
