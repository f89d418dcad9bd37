"""Hunyuan's dense models: queries and keys are normed after they are rotated."""

from __future__ import annotations

from types import MappingProxyType

from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def _fields(stated: StatedConfig | StatedMetadata) -> Fields:
    return {"qk_norm_after_rope": True}


HUNYUAN = Family(
    model_types=("hunyuan_v1_dense",),
    architectures=("hunyuan-dense",),
    of_config=_fields,
    of_metadata=_fields,
    parts=MappingProxyType(
        {
            "self_attn.query_layernorm": "self_attn.q_norm",
            "self_attn.key_layernorm": "self_attn.k_norm",
        }
    ),
)
