"""Where a model's own files have layers for multi-token prediction, beside those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

STATED = "num_nextn_predict_layers"  # in config.json
MIMO_PREFIX = "model.mtp_layers.0."
# As Qwen3-Next and Qwen 3.5 have it, beside layers with a recurrent state.
RECURRENT_PREFIX = "mtp."

_Stored = TypeVar("_Stored")


def mtp_prefix(values: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Returns what the names of the first such layer begin with. values: of config.json; None where
    it states none, or where there is none."""
    if not values.get(STATED):
        return None
    prefixes = (MIMO_PREFIX, f"model.layers.{values.get('num_hidden_layers')}.")
    known = list(names)
    return next((each for each in prefixes if any(n.startswith(each) for n in known)), None)


def without_mtp(values: Mapping[str, Any], stored: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """Returns a model's tensors without those of such layers, which it computes nothing from."""
    count, first = values.get(STATED), values.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(first, int):
        return dict(stored)
    layers = tuple(f"model.layers.{first + each}." for each in range(min(count, 64)))
    return {n: t for n, t in stored.items() if not n.startswith(("model.mtp_layers.", *layers))}
