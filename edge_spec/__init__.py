"""Language models on your own machine, faster by lossless speculative decoding.

import edge_spec

with edge_spec.load("smollm2") as llm:
    print(llm.chat("Why is the sky blue?").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.answer_options import AnswerOptions, ChatOptions
    from edge_spec.async_engine import AsyncEngine, load_async
    from edge_spec.engine import Engine
    from edge_spec.errors import EdgeSpecError
    from edge_spec.generation import Generation
    from edge_spec.grammar import Grammar
    from edge_spec.metrics import Stats
    from edge_spec.opening import load
    from edge_spec.results import Alternative, Chunk, FinishReason, GenerationResult, Origin, Token
    from edge_spec.sampling import SamplingParams

# Imported when first used, so that `import edge_spec` costs nothing.
_HOMES = {
    "Alternative": "results",
    "AnswerOptions": "answer_options",
    "AsyncEngine": "async_engine",
    "ChatOptions": "answer_options",
    "Chunk": "results",
    "EdgeSpecError": "errors",
    "Engine": "engine",
    "FinishReason": "results",
    "Generation": "generation",
    "GenerationResult": "results",
    "Grammar": "grammar",
    "Origin": "results",
    "SamplingParams": "sampling",
    "Stats": "metrics",
    "Token": "results",
    "load": "opening",
    "load_async": "async_engine",
}

__all__ = [
    "Alternative",
    "AnswerOptions",
    "AsyncEngine",
    "ChatOptions",
    "Chunk",
    "EdgeSpecError",
    "Engine",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "Grammar",
    "Origin",
    "SamplingParams",
    "Stats",
    "Token",
    "load",
    "load_async",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_spec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_spec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
