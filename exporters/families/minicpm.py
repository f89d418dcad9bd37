"""MiniCPM 1 and 2 (Hu et al. 2024)."""

from __future__ import annotations

from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    layers, hidden = int(values["num_hidden_layers"]), int(values["hidden_size"])
    return {
        "embedding_scale": float(values.get("scale_emb", 1.0)),
        "residual_scale": float(values.get("scale_depth", 1.0)) / layers**0.5,
        "logit_scale": int(values.get("dim_model_base", 1)) / hidden,
    }


def _of_metadata(stated: StatedMetadata) -> Fields:
    """Older files state none of them: llama.cpp takes those of the 2B model then."""
    layers, hidden = stated.num_layers, int(stated.require("embedding_length", int))
    return {
        "embedding_scale": stated.get("embedding_scale", float) or 12.0,
        "residual_scale": stated.get("residual_scale", float) or 1.4 / layers**0.5,
        "logit_scale": 1 / (stated.get("logit_scale", float) or hidden / 256),
    }


MINICPM = Family(
    model_types=("minicpm",),
    architectures=("minicpm",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    defaults={"tie_word_embeddings": True},
    is_permuted=True,
)
