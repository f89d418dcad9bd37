"""Static bundles in onnxruntime: a graph a function, all on one file of weights."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np
from onnxruntime import RunOptions

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import SessionError, UsageError
from edge_spec.fitting.devices import CPU
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort.graph_loader import GraphLoader
from edge_spec.runtimes.static.interruption import Interruption
from edge_spec.runtimes.static.model import StaticModel, config_of
from edge_spec.runtimes.static.onnx_graphs import OpenedGraphs
from edge_spec.runtimes.static.onnx_program import OnnxProgram

# What becomes of DequantizeLinear and MatMul: activations stay float32. As int8, which is the
# default, they turn the last bits by which passes of other widths differ into a tenth of a logit.
# Blocks stay integers; a channel of 8 bits has no fast kernel then, and is widened once.
_ENTRIES = {
    "int4": {"session.qdq_matmulnbits_accuracy_level": "1"},
    "int8": {"session.disable_quant_qdq": "1"},
}


class OrtGraphs:
    """The InferenceSessions of a bundle's functions, each loaded when it is first run: every one
    has a copy of the weights in the order of its kernels."""

    def __init__(self, loader: GraphLoader, files: Mapping[str, str]) -> None:
        self._loader = loader
        self._files = files
        self._loaded: dict[str, Any] = {}
        self._lock = Lock()  # sessions may be used by threads of their own

    def run(
        self, function: str, inputs: Mapping[str, np.ndarray], interruption: Interruption
    ) -> Mapping[str, np.ndarray]:
        """Raises BundleError, DeviceError where the function cannot be loaded, too."""
        with self._lock:
            if function not in self._loaded:
                self._loaded[function] = self._loader.open(self._files[function])
            inference = self._loaded[function]
        names = [value.name for value in inference.get_outputs()]
        options = RunOptions()
        try:
            with interruption.ended_by(lambda: setattr(options, "terminate", True)):
                return dict(zip(names, inference.run(names, dict(inputs), options), strict=True))
        except SessionError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise SessionError(
                f"onnxruntime failed to run {function}: {error}",
                remedy="Export the model again, or choose another --runtime.",
            ) from error


def open_static(bundle: Bundle, options: RuntimeOptions) -> StaticModel:
    """Raises UsageError for other devices than the CPU and a context beyond the cache, BundleError
    for graphs that are not those of the manifest, or that onnxruntime cannot load."""
    others = [name for name in options.providers if name.lower() != CPU]
    if others:
        raise UsageError(
            f"ort runs {bundle.path}, whose shapes are fixed, on the cpu, not on "
            f"{', '.join(others)}",
            remedy="Choose --device cpu, or export the model with --format onnx.",
        )
    entries = _ENTRIES.get(bundle.manifest.quantization.partition(" ")[0], {})
    return open_graphs(bundle, options, OpenedGraphs.of(bundle), entries)


def open_graphs(
    bundle: Bundle, options: RuntimeOptions, opened: OpenedGraphs, entries: Mapping[str, str]
) -> StaticModel:
    """entries: of onnxruntime's session configuration. Raises UsageError, BundleError."""
    graphs = OrtGraphs(GraphLoader(bundle, options, entries=entries), opened.files)
    program = OnnxProgram(graphs, opened.signatures)
    return StaticModel(program, opened.layout, config_of(bundle, options))
