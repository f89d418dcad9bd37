"""Runs `exporters/coreai`'s programs on macOS 27, and on Linux to check them; imports coreai when a
model is opened."""

from edge_spec.runtimes.coreai.model import CoreAiRuntime

__all__ = ["CoreAiRuntime"]
