"""Write ONNX bundles straight from a checkpoint's tensors."""

from edge_spec.exporters.onnx.export import OnnxExporter
from edge_spec.exporters.onnx.static import StaticOnnxExporter

__all__ = ["OnnxExporter", "StaticOnnxExporter"]
