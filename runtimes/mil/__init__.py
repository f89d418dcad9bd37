"""Core ML packages evaluated in numpy, on any system: slow, for checks.

It reads packages and keeps slots as `runtimes/coreml` does, and runs the program itself. Nothing
here imports coremltools before a model is opened.
"""

from edge_spec.runtimes.mil.runtime import MilRuntime

__all__ = ["MilRuntime"]
