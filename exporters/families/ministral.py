"""Ministral 3, and the text models of Mistral 3's family: YaRN, longer queries in long texts."""

from __future__ import annotations

from edge_spec.exporters.families import llama
from edge_spec.exporters.families.family import PICTURES, TEXT_PREFIXES, Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def _of_config(stated: StatedConfig) -> Fields:
    """Queries are as they are within the original length, which is all that runs."""
    fields = llama.of_config(stated)
    rope = stated.values.get("rope_parameters") or {}
    if not rope.get("llama_4_scaling_beta"):
        return fields
    length = min(stated.context_length, int(rope["original_max_position_embeddings"]))
    return {**fields, "context_length": min(length, fields.get("context_length", length))}


def _of_metadata(stated: StatedMetadata) -> Fields:
    original = stated.get("rope.scaling.original_context_length", int)
    if not (original and stated.get("attention.temperature_scale", float)):
        return {}
    return {"context_length": min(stated.context_length, original)}


MINISTRAL = Family(
    model_types=("ministral3", "mistral3"),
    architectures=("mistral3",),
    limits={"mistral3": "text"},
    of_config=_of_config,
    of_metadata=_of_metadata,
    is_permuted=True,
    prefixes=TEXT_PREFIXES,
    ignored=PICTURES,
)
