"""Granite 3 and the dense ones of Granite 4, whose multipliers come from muP (Yang et al. 2022)."""

from __future__ import annotations

from edge_spec.core.layer_kind import LayerKind
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    return {
        "embedding_scale": float(values.get("embedding_multiplier", 1.0)),
        "residual_scale": float(values.get("residual_multiplier", 1.0)),
        "attention_scale": float(values.get("attention_multiplier", 1.0)),
        "logit_scale": 1 / float(values.get("logits_scaling", 1.0)),
    }


def _of_metadata(stated: StatedMetadata) -> Fields:
    return {
        "embedding_scale": stated.get("embedding_scale", float) or 1.0,
        "residual_scale": stated.get("residual_scale", float) or 1.0,
        "attention_scale": stated.get("attention.scale", float) or None,
        "logit_scale": 1 / (stated.require("logit_scale", float) or 1.0),
    }


GRANITE = Family(
    model_types=("granite",),
    architectures=("granite",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    is_permuted=True,
)


def _of_hybrid(stated: StatedConfig) -> Fields:
    """Granite 4 without recurrent layers and experts: its one MLP is the one that they would
    share."""
    inner = int(stated.values["shared_intermediate_size"])
    fields = {**_of_config(stated), "intermediate_size": inner}
    if stated.values.get("position_embedding_type") == "rope":
        return fields
    return {**fields, "layer_kinds": (LayerKind(None),)}


GRANITE4 = Family(
    model_types=("granitemoehybrid",),
    architectures=(),
    of_config=_of_hybrid,
    defaults={"num_local_experts": 8, "position_embedding_type": None},
    limits={"granitemoehybrid": "dense without Mamba"},
    parts={
        "shared_mlp.input_linear": "mlp.gate_up_proj",
        "shared_mlp.output_linear": "mlp.down_proj",
    },
)
