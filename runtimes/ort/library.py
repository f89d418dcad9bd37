"""onnxruntime, where it is installed whole."""

from __future__ import annotations

from typing import Any

from edge_spec.errors import MissingDependencyError

_INSTALL = 'Run: pip install "edge-spec[cpu]" (or edge-spec[gpu] for CUDA).'
_REINSTALL = (
    "onnxruntime and onnxruntime-gpu are one module: uninstall both, then "
    'pip install "edge-spec[cpu]" or "edge-spec[gpu]".'
)


def import_onnxruntime() -> Any:
    """Raises MissingDependencyError, also for one that is damaged."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise MissingDependencyError("onnxruntime is not installed", remedy=_INSTALL) from None
    except ImportError as error:
        raise MissingDependencyError(
            f"onnxruntime is installed and does not load: {error}", remedy=_REINSTALL
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingDependencyError("onnxruntime is installed in part", remedy=_REINSTALL)
    return onnxruntime
