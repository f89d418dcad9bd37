"""Gemma 2 and 3 as models of text (Gemma Team 2024 and 2025)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from edge_spec.core.config import LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import PICTURES, TEXT_PREFIXES, Family, Fields
from edge_spec.exporters.families.layers import FULL, GGUF_POST_NORMS, SLIDING, of_types
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata

_LOCAL_THETA = 10000.0
_LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}  # whose scale is not of a head: GGUF lacks it
_PERIODS = {"gemma2": 2, "gemma3": 6}  # of layers, of which the last sees all
_PARTS = {
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
_THIRD = {
    "max_position_embeddings": 131072,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "vocab_size": 262208,
}


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    is_third = values["model_type"] != "gemma2"
    full = stated.rope(FULL)
    local = stated.rope(SLIDING, "rope_local_base_freq", scaled=False) if is_third else full
    types = stated.layer_types(_PERIODS["gemma3" if is_third else "gemma2"])
    return {
        **_common(int(values["hidden_size"]), full, local, int(values["sliding_window"]), types),
        "attention_scale": float(values["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": stated.optional("attn_logit_softcapping"),
        "logit_softcap": stated.optional("final_logit_softcapping"),
    }


def _of_metadata(stated: StatedMetadata) -> Fields:
    architecture, hidden = stated.architecture, int(stated.require("embedding_length", int))
    full = stated.rope()
    local = Rope(stated.get("rope.freq_base_swa", float) or _LOCAL_THETA)
    window = int(stated.require("attention.sliding_window", int))
    types = stated.layer_types(_PERIODS[architecture])
    width = stated.head_dim()
    if stated.num_layers == _LARGEST_LAYERS[architecture]:
        width = hidden // stated.num_heads
    return {
        **_common(hidden, full, local if architecture == "gemma3" else full, window, types),
        "attention_scale": width**-0.5,
        "attention_softcap": stated.get("attn_logit_softcapping", float),
        "logit_softcap": stated.get("final_logit_softcapping", float),
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
    of_config=_of_config,
    of_metadata=_of_metadata,
    defaults=MappingProxyType(_DEFAULTS),
    parts=MappingProxyType(_PARTS),
    gguf_parts=GGUF_POST_NORMS,
    norm_offset=1.0,
)
GEMMA3 = replace(
    GEMMA2,
    model_types=("gemma3_text", "gemma3"),
    architectures=("gemma3",),
    defaults=MappingProxyType(_DEFAULTS | _THIRD),
    prefixes=TEXT_PREFIXES,
    ignored=PICTURES,
)
