"""Imports onnxruntime."""

from __future__ import annotations

from typing import Any

from edge_spec.errors import install
from edge_spec.runtimes.libraries import import_library

_INSTALL = f"{install('cpu')} (or .[gpu] for CUDA)."
_REINSTALL = (
    f"onnxruntime and onnxruntime-gpu are one module: uninstall both. {install('cpu')} or .[gpu]."
)


def import_onnxruntime() -> Any:
    """Raises MissingDependencyError if onnxruntime is missing or damaged."""
    return import_library("onnxruntime", "InferenceSession", _INSTALL, _REINSTALL)
