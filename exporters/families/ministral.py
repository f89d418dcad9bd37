"""Ministral 3, and the text models of Mistral 3's family: YaRN, longer queries in long texts."""

from __future__ import annotations

from edge_spec.exporters.families import llama
from edge_spec.exporters.families.family import PICTURES, TEXT_PREFIXES, Family, Fields
from edge_spec.exporters.families.stated import StatedConfig


def _of_config(stated: StatedConfig) -> Fields:
    """Queries are as they are within the original length, which is all that runs."""
    fields = llama.of_config(stated)
    rope = stated.values.get("rope_parameters") or {}
    if not rope.get("llama_4_scaling_beta"):
        return fields
    length = min(stated.context_length, int(rope["original_max_position_embeddings"]))
    return {**fields, "context_length": min(length, fields.get("context_length", length))}


MINISTRAL = Family(
    model_types=("ministral3", "mistral3"),
    architectures=(),
    of_config=_of_config,
    prefixes=TEXT_PREFIXES,
    ignored=PICTURES,
)
