"""llama.cpp and its fork ik_llama.cpp: run GGUF files.

`LlamaCppSession` lives in `.session`; the libraries load when a model is opened.
"""

from edge_spec.runtimes.llamacpp.model import LlamaCppModel
from edge_spec.runtimes.llamacpp.runtime import IkRuntime, LlamaCppRuntime

__all__ = ["IkRuntime", "LlamaCppModel", "LlamaCppRuntime"]
