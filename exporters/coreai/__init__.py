"""Writes Core AI programs on Linux and macOS, from named tensors, without torch."""

from edge_spec.exporters.coreai.export import CoreAiExporter

__all__ = ["CoreAiExporter"]
