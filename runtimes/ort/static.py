"""Static bundles in onnxruntime: a graph a function, all on one file of weights.

Bundles that were compiled for one NPU of Qualcomm's are opened where that is. That is written from
the documentation of onnxruntime's QNN provider; not measured on an NPU.
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
from edge_spec.runtimes.ort.devices import QNN, choices, load_packages
from edge_spec.runtimes.ort.graph_loader import GraphLoader
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.static.onnx_program import OnnxProgram, OpenedGraphs
from edge_spec.runtimes.static.session import StaticModel, config_of

# What becomes of DequantizeLinear and MatMul: activations stay float32. As int8, which is the
# default, they turn the last bits by which passes of other widths differ into a tenth of a logit.
# Blocks stay integers; a channel of 8 bits has no fast kernel then, and is widened once.
_ENTRIES = {
    "int4": {"session.qdq_matmulnbits_accuracy_level": "1"},
    "int8": {"session.disable_quant_qdq": "1"},
}


class OrtGraphs(OnnxProgram):
    """The InferenceSessions of a bundle's functions, each loaded when it is first run: every one
    has a copy of the weights in the order of its kernels."""

    def __init__(self, loader: GraphLoader, opened: OpenedGraphs) -> None:
        super().__init__(opened)
        self._loader = loader
        self._files = opened.files
        self._loaded: dict[str, Any] = {}
        self._lock = Lock()  # sessions may be used by threads of their own

    def run(self, function: str, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Raises BundleError, DeviceError where the function cannot be loaded, too."""
        with self._lock:
            if function not in self._loaded:
                self._loaded[function] = self._loader.open(self._files[function])
            inference = self._loaded[function]
        names = [value.name for value in inference.get_outputs()]
        try:
            return dict(zip(names, inference.run(names, dict(inputs)), strict=True))
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise SessionError(
                f"onnxruntime failed to run {function}: {error}",
                remedy="Export the model again, or choose another --runtime.",
            ) from error


COMPILED = "qnn"  # the format of bundles for an NPU
_EXPORT_HERE = "Export the model without --compile, or for this machine (--soc)."
_SHARES = {"ep.share_ep_contexts": "1"}  # functions find the binary that the first has loaded
_SOC_ID = Path("/sys/devices/soc0/machine")  # a processor's name, on Linux and Android
_SOC = re.compile(r"(SM|SC)\d{4}[A-Z]*")  # as QNN has it; some systems tell a name of their own


def open_static(bundle: Bundle, options: RuntimeOptions) -> StaticModel:
    """Raises UsageError for other devices than its own and a context beyond the cache, DeviceError
    where the NPU that it was compiled for is not there, BundleError for graphs that are not those
    of the manifest, or that onnxruntime cannot load."""
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
    """Raises DeviceError."""
    load_packages()
    if QNN not in choices(import_onnxruntime()):
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
    """The processor's name as QNN has it; None where the system does not tell."""
    try:
        name = _SOC_ID.read_text(encoding="ascii").strip().upper()
    except (OSError, ValueError):
        return None
    return name if _SOC.fullmatch(name) else None
