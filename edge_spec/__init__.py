"""Language models on your own machine, faster by lossless speculative decoding.

import edge_spec

with edge_spec.load("smollm2") as llm:
    print(llm.chat("Why is the sky blue?").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.engine import Engine
    from edge_spec.errors import EdgeSpecError
    from edge_spec.generation import Generation
    from edge_spec.loading import load
    from edge_spec.results import Chunk, FinishReason, GenerationResult, Token
    from edge_spec.sampling import SamplingParams

# Imported when first used, so that `import edge_spec` costs nothing.
_HOMES = {
    "Chunk": "results",
    "EdgeSpecError": "errors",
    "Engine": "engine",
    "FinishReason": "results",
    "Generation": "generation",
    "GenerationResult": "results",
    "SamplingParams": "sampling",
    "Token": "results",
    "load": "loading",
}

__all__ = [
    "Chunk",
    "EdgeSpecError",
    "Engine",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "SamplingParams",
    "Token",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_spec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_spec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
