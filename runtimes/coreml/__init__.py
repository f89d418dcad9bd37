"""Runs `exporters/coreml`'s packages on macOS; imports coremltools when a model is opened."""

from edge_spec.runtimes.coreml.native import CoreMlRuntime

__all__ = ["CoreMlRuntime"]
