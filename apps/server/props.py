"""The properties of a model, in the terms of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from edge_spec import Engine, SamplingParams
from edge_spec.apps.server.options import ServerOptions
from edge_spec.core.recommended_sampling import sampling_source, sampling_text


def props_document(name: str, engine: Engine, options: ServerOptions) -> dict[str, Any]:
    """Makes `documents.Props`: how the page has its conversations answered, and what requests get
    that do not say."""
    asked = options.asked_sampling
    of_page = engine.chat_sampling(**asked)
    return {
        "default_generation_settings": {
            "n_ctx": engine.context_length,
            "params": _params(of_page, options),
        },
        "total_slots": options.parallel,
        "model_alias": name,
        "edge_spec": {
            "sampling": sampling_text(of_page),
            "sampling_source": sampling_source(engine.parts.text.sampling, asked),
            "request_params": _params(options.sampling, options),
        },
    }


def _params(sampling: SamplingParams, options: ServerOptions) -> dict[str, float]:
    """n_predict: -1 is to the end of the context."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "n_predict": -1 if options.max_tokens is None else options.max_tokens,
    }
