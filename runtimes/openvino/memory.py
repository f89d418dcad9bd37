"""Forecasts the memory of a bundle in OpenVINO, from its manifest alone.

Measured with OpenVINO 2026.4 on x86-64: the CPU plugin copies every matrix when it compiles, and
once more in its kernel's own order at the first pass, while the original stays mapped. For the demo
model and for one of 1B this says 586 MB and 2.6 GB with 1000 tokens; 680 MB and 2.4 GB were found.
What a GPU's own memory will hold was not measured on one: it is added up from what is copied there.

On an NPU nothing was measured.
"""

from __future__ import annotations

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceMemoryError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, NPU, Memory, context_tokens
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS, room_read_whole
from edge_spec.runtimes.openvino.library import NpuDevice
from edge_spec.runtimes.static.session import session_bytes

DATA_FILE = "model.onnx.data"
LIBRARY_BYTES = 90_000_000  # code and tables, once they are in use
_LAYER_BYTES = 2_000_000  # its nodes, compiled
_FLOAT = 4
_SCORE_BUFFERS = 4  # scores of a prefill, before and after the softmax and its slices


def bundle_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Raises BundleError where the bundle has no weights."""
    config = bundle.config
    length, used = context_tokens(config.context_length, options, num_tokens)
    slots = room_read_whole(used, length)
    stored = bundle.file(DATA_FILE).stat().st_size
    token = 2 * config.num_layers * config.kv_size * _FLOAT
    graph = _LAYER_BYTES * config.num_layers
    inner = 4 * config.intermediate_size + 4 * config.hidden_size
    rows = PREFILL_ROWS * (inner + config.query_size + 2 * config.kv_size) * _FLOAT
    scores = _SCORE_BUFFERS * PREFILL_ROWS * config.num_heads * (slots + PREFILL_ROWS) * _FLOAT
    answers = MAX_ROWS * (config.vocab_size + config.hidden_size) * _FLOAT
    cache, work = token * slots, rows + scores + answers + token * PREFILL_ROWS
    device = options.providers[0].lower() if options.providers else CPU
    if device == CPU:
        return Memory(3 * stored + graph, cache, work, LIBRARY_BYTES, mapped_twice=stored)
    return Memory(
        stored, cache, answers, LIBRARY_BYTES, stored, {device: stored + graph + cache + work}
    )


def npu_memory(bundle: Bundle, options: RuntimeOptions, num_tokens: int | None) -> Memory:
    """Forecast the same for any number of tokens: a session has all of its slots at once."""
    states, scores = session_bytes(bundle, options, num_tokens)
    on_npu = weights_on_npu(bundle) + scores
    return Memory(0, states, 0, LIBRARY_BYTES, on_devices={NPU: on_npu})


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
