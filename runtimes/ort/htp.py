"""Bundles that were compiled for one NPU of Qualcomm's, opened where that is.

Written from the documentation of onnxruntime's QNN provider; not measured on an NPU.
"""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import BundleError, DeviceError, UsageError
from edge_spec.models.bundle import Bundle, CompiledFor
from edge_spec.runtimes.ort.devices import QNN, choices, load_packages
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.static import open_graphs
from edge_spec.runtimes.static.model import StaticModel
from edge_spec.runtimes.static.onnx_graphs import OpenedGraphs

COMPILED = "qnn"  # the format of such bundles
_PACKAGE = "onnxruntime-qnn"
_EXPORT_HERE = "Export the model without --compile, or for this machine (--soc)."
_SHARES = {"ep.share_ep_contexts": "1"}  # functions find the binary that the first has loaded
_SOC_ID = Path("/sys/devices/soc0/machine")  # a processor's name, on Linux and Android
_SOC = re.compile(r"(SM|SC)\d{4}[A-Z]*")  # as QNN has it; some systems tell a name of their own


def open_compiled(bundle: Bundle, options: RuntimeOptions) -> StaticModel:
    """Raises DeviceError where the NPU that it was compiled for is not there, or a provider older
    than its compiler, UsageError for another device, BundleError for a damaged bundle."""
    compiled = bundle.manifest.compiled
    if compiled is None:
        raise BundleError(
            f"{bundle.path} does not say what it was compiled for", remedy="Export it again."
        )
    others = [name for name in options.providers if name.lower() != QNN]
    if others:
        raise UsageError(
            f"{bundle.path} was compiled for {compiled} and does not run on {', '.join(others)}",
            remedy=f"Choose --device {QNN}, or export the model without --compile.",
        )
    require_hardware(bundle, compiled)
    opened = OpenedGraphs.of(bundle, COMPILED)
    return open_graphs(bundle, replace(options, providers=(QNN,)), opened, _SHARES)


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
    installed, needed = _version(), compiled.versions.get(_PACKAGE, "")
    if _numbers(installed) < _numbers(needed):
        raise DeviceError(
            f"{bundle.path} was compiled by {_PACKAGE} {needed}, here is {installed}",
            remedy=f"Run: pip install --upgrade {_PACKAGE}",
        )


def _soc() -> str | None:
    """The processor's name as QNN has it; None where the system does not tell."""
    try:
        name = _SOC_ID.read_text(encoding="ascii").strip().upper()
    except (OSError, ValueError):
        return None
    return name if _SOC.fullmatch(name) else None


def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".") if part.isdecimal()]
