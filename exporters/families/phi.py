"""Phi-3, 3.5 and 4-mini (Abdin et al. 2024): fused matrices, part of a head rotated, LongRoPE."""

from __future__ import annotations

from edge_spec.core.config import LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig, StatedMetadata


def _of_config(stated: StatedConfig) -> Fields:
    window = stated.values.get("sliding_window")
    original = stated.values.get("original_max_position_embeddings")
    return _fields(stated.rope(), stated.context_length, window, original)


def _of_metadata(stated: StatedMetadata) -> Fields:
    window = stated.get("attention.sliding_window", int)
    original = stated.get("rope.scaling.original_context_length", int)
    return _fields(stated.rope(), stated.context_length, window, original)


def _fields(rope: Rope, length: int, window: int | None, original: int | None) -> Fields:
    """The factors for short texts hold for those of the original length, which are all that run:
    with the others a text would have to be read again at that length."""
    is_scaled = rope.scaling is not None and original is not None
    length = min(length, int(original)) if is_scaled and original else length
    if not window or int(window) >= length:
        return {"context_length": length}
    return {"context_length": length, "layer_kinds": (LayerKind(rope, int(window)),)}


PHI = Family(
    model_types=("phi3",),
    architectures=("phi3",),
    of_config=_of_config,
    of_metadata=_of_metadata,
    gguf_parts={"ffn_up": "mlp.gate_up_proj"},
)
