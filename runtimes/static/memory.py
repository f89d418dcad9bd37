"""Forecasts what a session of a static bundle takes, from its manifest alone."""

from __future__ import annotations

from edge_spec.core.model import RuntimeOptions
from edge_spec.fitting.devices import context_tokens
from edge_spec.models.bundle import Bundle

FLOAT, HALF = 4, 2  # bytes
_PADDING_SLOTS = 64  # at most, beside the context


def session_bytes(
    bundle: Bundle, options: RuntimeOptions, num_tokens: int | None
) -> tuple[int, int]:
    """Returns the bytes of a session's states, the same for any number of tokens since it has all
    of its slots at once, and those of the scores of a prefill."""
    config = bundle.config
    length, _ = context_tokens(config.context_length, options, num_tokens)
    element = FLOAT if bundle.manifest.quantization == "fp32" else HALF
    slots = config.context_length + _PADDING_SLOTS
    states = 2 * config.num_layers * config.kv_size * slots * element
    return states, FLOAT * config.num_heads * _PADDING_SLOTS * (length + _PADDING_SLOTS)
