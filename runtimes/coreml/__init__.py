"""Core ML packages, as `exporters/coreml` writes them, run by Core ML on macOS.

Nothing here imports coremltools before a model is opened.
"""

from edge_spec.runtimes.coreml.native import CoreMlRuntime

__all__ = ["CoreMlRuntime"]
