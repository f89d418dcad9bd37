"""ONNX Runtime: runs the bundles that `exporters/onnx` writes.

Its sessions live in `.session`, which imports onnxruntime; this does not.
"""

from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.runtimes.ort.runtime import OrtRuntime

__all__ = ["OrtModel", "OrtRuntime"]
