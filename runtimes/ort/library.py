"""Imports onnxruntime."""

from __future__ import annotations

from typing import Any

from edge_spec.runtimes.libraries import import_library

_INSTALL = 'Run: pip install "edge-spec[cpu]" (or edge-spec[gpu] for CUDA).'
_REINSTALL = (
    "onnxruntime and onnxruntime-gpu are one module: uninstall both, then "
    'pip install "edge-spec[cpu]" or "edge-spec[gpu]".'
)


def import_onnxruntime() -> Any:
    """Raises MissingDependencyError if onnxruntime is missing or damaged."""
    return import_library("onnxruntime", "InferenceSession", _INSTALL, _REINSTALL)
