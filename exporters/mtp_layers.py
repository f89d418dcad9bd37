"""Finds the layers for multi-token prediction in a model's own files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from edge_spec.exporters.gguf_reader import Metadata
from edge_spec.exporters.stored_tensor import damaged

STATED = "num_nextn_predict_layers"  # in config.json
MIMO_PREFIX = "model.mtp_layers.0."
MTP_PREFIX = "mtp."  # as Qwen3-Next and Qwen 3.5 have it, beside layers with a recurrent state

_Stored = TypeVar("_Stored")


def mtp_prefix(values: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Returns what the names of the first such layer begin with. values: of config.json; None where
    it states none, or where there is none."""
    if not values.get(STATED):
        return None
    prefixes = (MIMO_PREFIX, f"model.layers.{values.get('num_hidden_layers')}.")
    known = list(names)
    return next((each for each in prefixes if any(n.startswith(each) for n in known)), None)


def main_layers(metadata: Metadata) -> int | None:
    """Returns the number of a model's own layers, where its GGUF file counts such layers among
    them, after all others; None where it has none. Raises ModelFileError for counts that no model
    has."""
    architecture = metadata.require("general.architecture", str)
    count = metadata.get(f"{architecture}.nextn_predict_layers", int) or 0
    layers = metadata.require(f"{architecture}.block_count", int) if count else 0
    if count and not 0 < count < layers:
        raise damaged(
            f"{metadata.path} states {count} layers for multi-token prediction among {layers}"
        )
    return layers - count if count else None


def is_only_mtp(names: Iterable[str]) -> bool:
    """Returns whether a GGUF file that states such layers has no others, as llama.cpp's
    converter writes with --mtp."""
    return not any(name.startswith("blk.0.") for name in names)


def without_mtp(values: Mapping[str, Any], stored: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """Returns a model's tensors without those of such layers, which it computes nothing from."""
    count, first = values.get(STATED), values.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(first, int):
        return dict(stored)
    layers = tuple(f"model.layers.{first + each}." for each in range(min(count, 64)))
    return {n: t for n, t in stored.items() if not n.startswith(("model.mtp_layers.", *layers))}
