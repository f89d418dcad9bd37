"""Static bundles in onnxruntime: one graph per function on one weights file. Bundles for a Qualcomm
NPU open only there; that code follows the QNN provider's documentation and was not measured.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import BundleError, DeviceError, SessionError, UsageError
from edge_spec.models.bundle import Bundle, CompiledFor
from edge_spec.models.devices import CPU
from edge_spec.runtimes.ort.devices import QNN, find_devices
from edge_spec.runtimes.ort.graph_loader import GraphLoader
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.static.onnx_program import OnnxProgram, OpenedGraphs
from edge_spec.runtimes.static.session import StaticModel, config_of

# Keep activations of DequantizeLinear and MatMul in float32. Int8, the default, magnifies last-bit
# differences between pass widths to a tenth of a logit. Blocks stay integers; 8-bit channels,
# without a fast kernel then, are widened once.
_ENTRIES = {
    "int4": {"session.qdq_matmulnbits_accuracy_level": "1"},
    "int8": {"session.disable_quant_qdq": "1"},
}


class OrtGraphs(OnnxProgram):
    """The graphs of a bundle's functions, each loaded when first run, with its own repacked
    weights."""

    def __init__(self, loader: GraphLoader, opened: OpenedGraphs) -> None:
        super().__init__(opened)
        self._loader = loader
        self._files = opened.files
        self._loaded: dict[str, Any] = {}
        self._lock = Lock()  # sessions may run in threads

    def run(self, function: str, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Raises SessionError; BundleError, DeviceError if the function does not load."""
        with self._lock:
            if function not in self._loaded:
                self._loaded[function] = self._loader.open(self._files[function])
            inference = self._loaded[function]
        names = [value.name for value in inference.get_outputs()]
        try:
            return dict(zip(names, inference.run(names, dict(inputs)), strict=True))
        except Exception as error:  # onnxruntime's share no base class
            raise SessionError(
                f"onnxruntime failed to run {function}: {error}",
                remedy="Export the model again, or choose another --runtime.",
            ) from error


COMPILED = "qnn"  # format of bundles for an NPU
_EXPORT_HERE = "Export the model without --compile, or for this machine (--soc)."
_SHARES = {"ep.share_ep_contexts": "1"}  # functions reuse the first one's binary
_SOC_ID = Path("/sys/devices/soc0/machine")  # the processor's name on Linux and Android
_SOC = re.compile(r"(SM|SC)\d{4}[A-Z]*")  # QNN's names; some systems have their own


def open_static(bundle: Bundle, options: RuntimeOptions) -> StaticModel:
    """Open a static bundle. Raises UsageError for another device or too long a context, DeviceError
    without its NPU, BundleError for graphs that do not load or match."""
    format, compiled = bundle.manifest.format, bundle.manifest.compiled
    is_compiled = format == COMPILED
    if is_compiled and compiled is None:
        raise BundleError(
            f"{bundle.path} does not say what it was compiled for", remedy="Export it again."
        )
    device = QNN if is_compiled else CPU
    others = ", ".join(name for name in options.providers if name.lower() != device)
    if others:
        export = "without --compile" if is_compiled else "with --format onnx"
        runs = f"was compiled for {compiled}" if is_compiled else "has fixed shapes"
        raise UsageError(
            f"{bundle.path} {runs} and does not run on {others}",
            remedy=f"Choose --device {device}, or export the model {export}.",
        )
    entries = _ENTRIES.get(bundle.manifest.quantization.partition(" ")[0], {})
    if is_compiled and compiled is not None:
        require_hardware(bundle, compiled)
        options, entries = replace(options, providers=(QNN,)), _SHARES
    opened = OpenedGraphs.of(bundle, format)
    program = OrtGraphs(GraphLoader(bundle, options, entries=entries), opened)
    return StaticModel(program, opened.layout, config_of(bundle, options))


def require_hardware(bundle: Bundle, compiled: CompiledFor) -> None:
    if QNN not in find_devices(import_onnxruntime()):
        raise DeviceError(
            f"{bundle.path} was compiled for {compiled}, this machine has no NPU of Qualcomm's "
            f"({_soc() or platform.machine() or 'another processor'})",
            remedy=_EXPORT_HERE,
        )
    soc = _soc()
    if soc is not None and soc != compiled.soc:
        raise DeviceError(
            f"{bundle.path} was compiled for {compiled}, this machine has {soc}",
            remedy=_EXPORT_HERE,
        )


def _soc() -> str | None:
    """Return QNN's name of the processor, if the system gives it."""
    try:
        name = _SOC_ID.read_text(encoding="ascii").strip().upper()
    except (OSError, ValueError):
        return None
    return name if _SOC.fullmatch(name) else None
