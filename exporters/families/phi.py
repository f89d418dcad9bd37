"""Phi-3, 3.5 and 4-mini (Abdin et al. 2024): fused matrices, part of a head rotated, LongRoPE."""

from __future__ import annotations

from edge_spec.core.layer_kind import LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata


def _of_config(stated: StatedConfig) -> Fields:
    return _fields(stated.rope(), stated.context_length, stated.values.get("sliding_window"))


def _of_metadata(stated: StatedMetadata) -> Fields:
    window = stated.get("attention.sliding_window", int)
    return _fields(stated.rope(), stated.context_length, window)


def _fields(rope: Rope, context_length: int, window: int | None) -> Fields:
    if not window or int(window) >= context_length:
        return {}
    return {"layer_kinds": (LayerKind(rope, int(window)),)}


PHI = Family(
    model_types=("phi3",),
    architectures=("phi3",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    gguf_parts={"ffn_up": "mlp.gate_up_proj"},
)
