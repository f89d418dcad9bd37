"""Writes ONNX bundles of models that `exporters/onnx` does not know, with optimum and torch."""

from edge_spec.exporters.optimum.export import OptimumExporter

__all__ = ["OptimumExporter"]
