"""Core AI programs, as `exporters/coreai` writes them: on macOS 27, and on Linux to check them.

Nothing here imports coreai before a model is opened.
"""

from edge_spec.runtimes.coreai.model import CoreAiRuntime

__all__ = ["CoreAiRuntime"]
