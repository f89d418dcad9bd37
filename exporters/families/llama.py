"""Llama, Mistral, Qwen 2 and 3 and MiMo: what all other families are described against."""

from __future__ import annotations

from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def of_config(stated: StatedConfig) -> Fields:
    """Returns the context that the window leaves."""
    window = stated.values.get("sliding_window")
    if not window or not stated.values.get("use_sliding_window", True):
        return {}
    return _within(int(window), stated.context_length)


def _of_metadata(stated: StatedMetadata) -> Fields:
    window = stated.get("attention.sliding_window", int)
    return _within(window, stated.context_length) if window else {}


def _within(window: int, context_length: int) -> Fields:
    """Ends the context with a window, within which sliding attention is full attention."""
    return {"context_length": min(context_length, window)}


# llama.cpp stores q and k of "llama", as which it runs Mistral too, for its interleaved rotation
# (convert_hf_to_gguf, LlamaModel.permute); the Qwen families keep Hugging Face's order.
PERMUTED = Family(
    model_types=("llama", "mistral"),
    architectures=("llama",),
    of_config=of_config,
    of_metadata=_of_metadata,
    is_permuted=True,
)
PLAIN = Family(
    model_types=("qwen2", "qwen3", "mimo"),  # MiMo is Qwen 2 and layers of its own
    architectures=("qwen2", "qwen3"),
    of_config=of_config,
    of_metadata=_of_metadata,
)
