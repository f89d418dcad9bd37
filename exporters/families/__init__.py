"""The model families that exporters read. Nothing else names a family."""

from __future__ import annotations

from edge_spec.exporters.families import decoders, encoders, ernie, gemma

_FAMILIES = (
    *decoders.FAMILIES,
    *gemma.FAMILIES,
    gemma.GEMMA4,
    decoders.GPT_OSS,
    decoders.LFM2,
    ernie.ERNIE,
    encoders.T5,
    *encoders.FAMILIES,
)
# Keys: model_type in config.json, and general.architecture in GGUF files.
BY_MODEL_TYPE = {name: family for family in _FAMILIES for name in family.model_types}
BY_ARCHITECTURE = {name: family for family in _FAMILIES for name in family.architectures}
