"""Models that OpenVINO computes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edge_spec.core.model import Capabilities, RuntimeOptions
from edge_spec.errors import BundleError, DeviceError, EdgeSpecError, UnsupportedModelError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.openvino.graph import DOMAIN, WEIGHT, rewrite
from edge_spec.runtimes.openvino.library import core, import_openvino
from edge_spec.runtimes.openvino.session import OpenVinoSession

GRAPH_FILE = "model.onnx"
_OPERATORS = re.compile(r"[Oo]perators?[^:]*?: *([\w.,;\- ]+)")
_ON_CPU: Mapping[str, str | int | bool] = {
    "INFERENCE_PRECISION_HINT": "f32",  # else it rounds to bfloat16 where the processor has that
    # Else it rounds what a matrix is multiplied with to int8. That is faster, but then the last
    # bits, which depend on where a row stands in its pass, move scores by whole steps of it.
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "ENABLE_CPU_PINNING": False,  # other models, and programs, run on the same cores
}


class OpenVinoModel:
    """One compiled model; sessions share its weights. device: a plugin's name, such as "GPU.1"."""

    def __init__(self, bundle: Bundle, options: RuntimeOptions, device: str) -> None:
        if bundle.manifest.kv_cache == "growing":
            raise UnsupportedModelError(
                f"openvino is not given bundles as optimum writes them ({bundle.path})",
                remedy="Choose --runtime ort.",
            )
        config = bundle.config
        length = min(options.context_length or config.context_length, config.context_length)
        self.config = replace(config, context_length=length)
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True
        )
        self.device = device
        # Constants lie where these are mapped, for as long as the model lives.
        read, self._weights = _read(bundle)
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        if device == "CPU":
            settings |= _ON_CPU
            if options.threads is not None:
                settings["INFERENCE_NUM_THREADS"] = options.threads
        try:
            self._compiled: Any = core().compile_model(read, device, settings)
        except RuntimeError as error:
            raise DeviceError(
                f"openvino cannot compile {bundle.path} for {device}: {_first_line(error)}",
                remedy="Choose another --device or --runtime, or update the driver.",
            ) from error

    def open_session(self) -> OpenVinoSession:
        return OpenVinoSession(self._compiled, self.config, self.device)

    def close(self) -> None:
        self._compiled = None
        self._weights = {}


def _read(bundle: Bundle) -> tuple[Any, Mapping[str, np.ndarray]]:
    """Returns openvino's model, and the mapped weights that its constants lie in.

    Raises UnsupportedModelError, BundleError."""
    import io

    path = bundle.file(GRAPH_FILE)
    made = rewrite(path, bundle.config)
    openvino = import_openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.onnx import ConversionExtension

    def weight(node: Any) -> Any:
        values = made.weights[node.get_attribute("key")]
        return openvino.op.Constant(values, shared_memory=True).outputs()

    frontend = FrontEndManager().load_by_framework("onnx")
    frontend.add_extension(ConversionExtension(WEIGHT, DOMAIN, weight))
    try:
        return frontend.convert(frontend.load(io.BytesIO(made.graph))), made.weights
    except Exception as error:  # the frontend's, which share no base class
        raise _read_error(error, bundle) from error


def _read_error(error: Exception, bundle: Bundle) -> EdgeSpecError:
    named = _OPERATORS.search(str(error))
    if named is not None:
        return UnsupportedModelError(
            f"openvino does not know operators of {bundle.path}: {named[1].strip()}",
            remedy="Choose --runtime ort.",
        )
    return BundleError(
        f"openvino cannot read {bundle.path}: {_first_line(error)}",
        remedy="Export the model again, or choose --runtime ort.",
    )


def _first_line(error: Exception) -> str:
    """Returns what an error says, without the places in the library's source."""
    lines = [line for line in str(error).splitlines() if line and " at src/" not in line]
    told = [line for line in lines if not line.startswith("Exception from")]
    return (told or lines or [type(error).__name__])[0]
