"""Writes Core AI programs, on Linux and macOS: they are built from named tensors, no torch."""

from edge_spec.exporters.coreai.export import CoreAiExporter

__all__ = ["CoreAiExporter"]
