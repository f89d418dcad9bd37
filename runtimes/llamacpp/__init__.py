"""llama.cpp: runs GGUF files.

`LlamaCppSession` lives in `.session`; the library loads when a model is opened.
"""

from edge_spec.runtimes.llamacpp.model import LlamaCppModel
from edge_spec.runtimes.llamacpp.runtime import LlamaCppRuntime

__all__ = ["LlamaCppModel", "LlamaCppRuntime"]
