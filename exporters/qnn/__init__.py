"""Compiles static bundles ahead of time for the NPUs of Qualcomm's processors (HTP)."""

from edge_spec.exporters.qnn.export import QnnExporter

__all__ = ["QnnExporter"]
