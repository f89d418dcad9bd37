"""OLMo 2 and 3 and EXAONE 4: norms after sublayers alone, and of queries and keys."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from edge_spec.core.layer_kind import LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.layers import FULL, GGUF_POST_NORMS, SLIDING, of_types
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata

_PERIOD = 4  # of layers, of which the last sees all
_PARTS = {
    "post_attention_layernorm": "self_attn.post_norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}


def _fields(full: Rope | None, local: Rope, window: int | None, types: list[str]) -> Fields:
    kinds = {SLIDING: LayerKind(local, window), FULL: LayerKind(full)}
    return {"norm_places": "after", **(of_types(kinds, types) if window else {})}


def _olmo(stated: StatedConfig) -> Fields:
    window = stated.values.get("sliding_window")
    types = stated.layer_types(_PERIOD) if window else []
    local = stated.rope(SLIDING, scaled=False)
    full = stated.rope(FULL)
    fields = _fields(full, local, window and int(window), types)
    stretched = {"rope_theta": full.theta, "rope_scaling": full.scaling}
    return {**fields, **stretched, "qk_norm_whole": True}


def _olmo_metadata(stated: StatedMetadata) -> Fields:
    window, rope = stated.get("attention.sliding_window", int), stated.rope()
    fields = _fields(rope, Rope(rope.theta), window, stated.layer_types(_PERIOD))
    return {**fields, "qk_norm_whole": True}


def _exaone(stated: StatedConfig) -> Fields:
    """Leaves out positions in all layers that do not slide, where some do."""
    window = stated.values.get("sliding_window")
    types = stated.layer_types(_PERIOD) if window else []
    return _fields(None, stated.rope(), window and int(window), types)


def _exaone_metadata(stated: StatedMetadata) -> Fields:
    window = stated.get("attention.sliding_window", int)
    return _fields(None, stated.rope(), window, stated.layer_types(_PERIOD))


_NAMES: Any = {"parts": MappingProxyType(_PARTS), "gguf_parts": GGUF_POST_NORMS}
# As GGUF, 3 is an olmo2 with a window.
OLMO2 = Family(("olmo2",), ("olmo2",), _olmo, _olmo_metadata, **_NAMES)
OLMO3 = Family(("olmo3",), (), _olmo, _olmo_metadata, {"rope_theta": 5e5}, **_NAMES)
EXAONE4 = Family(("exaone4",), ("exaone4",), _exaone, _exaone_metadata, **_NAMES)
