"""ONNX Runtime: runs the bundles that `exporters/onnx` writes.

`OrtSession` lives in `.session`, which imports onnxruntime; this does not.
"""

from edge_spec.runtimes.ort.model import OrtModel, OrtRuntime

__all__ = ["OrtModel", "OrtRuntime"]
