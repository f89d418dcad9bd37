"""Writes ONNX bundles straight from a checkpoint's tensors."""

from edge_spec.exporters.onnx.export import OnnxExporter

__all__ = ["OnnxExporter"]
