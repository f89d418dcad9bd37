"""ONNX Runtime: runs the bundles that `exporters/onnx` writes."""

from edge_spec.runtimes.ort.runtime import OrtRuntime

__all__ = ["OrtRuntime"]
