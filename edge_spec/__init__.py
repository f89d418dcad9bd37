"""Language models on your own machine, faster by lossless speculative decoding.

import edge_spec

with edge_spec.load("smollm2") as llm:
    print(llm.chat("Why is the sky blue?").text)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Opt out of libraries' telemetry, also in child processes, before any other import: onnxruntime
# starts reporting when imported. The user's settings win.
for _name, _value in (
    ("DO_NOT_TRACK", "1"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("ORT_DISABLE_TELEMETRY", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from edge_spec.core.metrics import Stats as Stats
    from edge_spec.core.sampling import SamplingParams as SamplingParams
    from edge_spec.engine.async_engine import AsyncEngine as AsyncEngine
    from edge_spec.engine.engine import Engine as Engine
    from edge_spec.engine.generation import Generation as Generation
    from edge_spec.engine.request import AnswerOptions as AnswerOptions
    from edge_spec.engine.request import ChatOptions as ChatOptions
    from edge_spec.engine.results import Alternative as Alternative
    from edge_spec.engine.results import Chunk as Chunk
    from edge_spec.engine.results import FinishReason as FinishReason
    from edge_spec.engine.results import GenerationResult as GenerationResult
    from edge_spec.engine.results import Origin as Origin
    from edge_spec.engine.results import Token as Token
    from edge_spec.errors import EdgeSpecError as EdgeSpecError
    from edge_spec.loader import load as load
    from edge_spec.loader.asynchronous import load_async as load_async
    from edge_spec.text.grammar import Grammar as Grammar
    from edge_spec.text.parts.part import PartKind as PartKind

# Imported when first used, so that `import edge_spec` costs nothing.
_HOMES = {
    "Alternative": "engine.results",
    "AnswerOptions": "engine.request",
    "AsyncEngine": "engine.async_engine",
    "ChatOptions": "engine.request",
    "Chunk": "engine.results",
    "EdgeSpecError": "errors",
    "Engine": "engine.engine",
    "FinishReason": "engine.results",
    "Generation": "engine.generation",
    "GenerationResult": "engine.results",
    "Grammar": "text.grammar",
    "Origin": "engine.results",
    "PartKind": "text.parts.part",
    "SamplingParams": "core.sampling",
    "Stats": "core.metrics",
    "Token": "engine.results",
    "load": "loader",
    "load_async": "loader.asynchronous",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_spec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edge_spec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
