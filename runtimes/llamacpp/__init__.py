"""Runs GGUF files with llama.cpp, which loads when a model is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.runtimes.llamacpp.model import LlamaCppModel
    from edge_spec.runtimes.llamacpp.runtime import LlamaCppRuntime

__all__ = ["LlamaCppModel", "LlamaCppRuntime"]


def __getattr__(name: str) -> Any:
    """Import lazily: the process that tests the kernels needs no runtime."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edge_spec.runtimes.llamacpp import model, runtime

    return model.LlamaCppModel if name == "LlamaCppModel" else runtime.LlamaCppRuntime
