"""Gemma 2 and 3 as models of text (Gemma Team 2024 and 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from edge_spec.core.model_parts import LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import PICTURES, TEXT_PREFIXES, Family, Fields
from edge_spec.exporters.families.stated import (
    FULL,
    GGUF_POST_NORMS,
    SLIDING,
    StatedConfig,
    of_types,
)
from edge_spec.exporters.families.stated_metadata import StatedMetadata

_LOCAL_THETA = 10000.0  # of Gemma 3, where GGUF does not state it


@dataclass(frozen=True)
class _Generation:
    period: int  # of layers, of which the last sees all
    layers_of_27b: int  # whose queries are scaled by a width that GGUF does not state
    has_local_rope: bool  # of the layers that do not see all
    attention_softcap: float | None = None  # where GGUF does not state it
    logit_softcap: float | None = None


_SECOND = _Generation(2, 46, False, attention_softcap=50.0, logit_softcap=30.0)
_THIRD = _Generation(6, 62, True)
NORMS = {
    "post_attention_layernorm": "self_attn.post_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp.post_norm",
}
_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS_OF_THIRD = {
    "max_position_embeddings": 131072,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "vocab_size": 262208,
}


def _of_config(generation: _Generation, stated: StatedConfig) -> Fields:
    values = stated.values
    full = local = stated.rope(FULL)
    if generation.has_local_rope:
        local = stated.rope(SLIDING, "rope_local_base_freq", scaled=False)
    types = stated.layer_types(generation.period)
    return {
        **_common(int(values["hidden_size"]), full, local, int(values["sliding_window"]), types),
        "attention_scale": float(values["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": stated.optional("attn_logit_softcapping"),
        "logit_softcap": stated.optional("final_logit_softcapping"),
    }


def _of_metadata(generation: _Generation, stated: StatedMetadata) -> Fields:
    hidden = int(stated.require("embedding_length", int))
    full = local = stated.rope()
    if generation.has_local_rope:
        local = Rope(stated.get("rope.freq_base_swa", float) or _LOCAL_THETA)
    window = int(stated.require("attention.sliding_window", int))
    width = stated.head_dim()
    if stated.num_layers == generation.layers_of_27b:
        width = hidden // stated.num_heads
    return {
        **_common(hidden, full, local, window, stated.layer_types(generation.period)),
        "attention_scale": width**-0.5,
        "attention_softcap": stated.get("attn_logit_softcapping", float)
        or generation.attention_softcap,
        "logit_softcap": stated.get("final_logit_softcapping", float) or generation.logit_softcap,
    }


def _common(hidden_size: int, full: Rope, local: Rope, window: int, types: list[str]) -> Fields:
    return {
        **of_types({SLIDING: LayerKind(local, window), FULL: LayerKind(full)}, types),
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "norm_places": "around",
        "activation": "gelu_tanh",
        "embedding_scale": hidden_size**0.5,
    }


GEMMA2 = Family(
    model_types=("gemma2",),
    architectures=("gemma2",),
    of_config=partial(_of_config, _SECOND),
    of_metadata=partial(_of_metadata, _SECOND),
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    parts=NORMS,
    gguf_parts=GGUF_POST_NORMS,
    norm_offset=1.0,
)
GEMMA3 = replace(
    GEMMA2,
    model_types=("gemma3_text", "gemma3"),
    architectures=("gemma3",),
    limits={"gemma3": "text"},
    of_config=partial(_of_config, _THIRD),
    of_metadata=partial(_of_metadata, _THIRD),
    defaults=_DEFAULTS | _DEFAULTS_OF_THIRD,
    prefixes=TEXT_PREFIXES,
    ignored=PICTURES,
)
FAMILIES = (GEMMA2, GEMMA3)
