"""Gemma 2 and 3 as models of text (Gemma Team 2024 and 2025).

Gemma 4 as models of text (Google 2026), those with experts beside their MLPs too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Experts, LayerEmbeddings, LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import PICTURES, TEXT_PREFIXES, Family, Fields, each_expert
from edge_spec.exporters.families.stated import (
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    GGUF_POST_NORMS,
    SLIDING,
    StatedConfig,
    StatedMetadata,
    kv_sources,
    of_types,
)
from edge_spec.exporters.stored_tensor import StoredTensor

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


_PERIOD = 6  # of layers, of which the last sees all
_OTHER_INPUTS = ("model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


# What experts and their router have beside matrices, and those of all experts at once.
_OF_EXPERTS = {
    ".router.scale": ".mlp.router_norm.weight",
    ".router.per_expert_scale": ".mlp.expert_scale",
    ".experts.gate_up_proj": ".mlp.experts.gate_up_proj.weight",
    ".experts.down_proj": ".mlp.experts.down_proj.weight",
}


class _Heads(NamedTuple):
    """Describes the heads of keys and values."""

    number: int
    size: int


def stated_kinds(stated: StatedConfig) -> list[LayerKind]:
    """Returns that of each layer."""
    values = stated.values
    types = [*stated.layer_types(_PERIOD)[:-1], FULL]  # whatever is stated of the last one
    base = _Heads(int(values["num_key_value_heads"]), stated.head_dim)
    has_keys_alone = bool(values["attention_k_eq_v"])
    kinds = []
    for layer, of_type in enumerate(types):
        heads = _stated_heads(values, layer, of_type, base)
        rope = stated.rope(of_type, head_dim=heads.size)
        window = None if of_type == FULL else int(values["sliding_window"])
        kinds.append(_kind(rope, window, heads, base, has_keys_alone))
    return kinds


def _gemma4(stated: StatedConfig) -> Fields:
    values, kinds = stated.values, stated_kinds(stated)
    num_own = len(kinds) - int(values["num_kv_shared_layers"])
    inner = int(values["intermediate_size"])
    wider = 2 * inner if values["use_double_wide_mlp"] else inner
    hidden = int(values["hidden_size"])
    experts: Fields = {}
    if values["enable_moe_block"]:
        counts = (int(values[key]) for key in ("num_experts", "top_k_experts"))
        experts = _experts(hidden, inner, int(values["moe_intermediate_size"]), *counts)
    return {
        **_gemma4_common(hidden, int(values["hidden_size_per_layer_input"] or 0)),
        **_of_layers(kinds, num_own, [inner] * num_own + [wider] * (len(kinds) - num_own)),
        **experts,
        "rope_theta": stated.rope(FULL).theta,
        "logit_softcap": stated.optional("final_logit_softcapping"),
    }


def _stated_heads(values: Mapping[str, Any], layer: int, of_type: str, base: _Heads) -> _Heads:
    own: Mapping[str, Any] = {}
    if values.get("per_layer_config"):  # where transformers 5 keeps it
        own = values["per_layer_config"].get(str(layer)) or {}
    elif of_type == FULL:
        count = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
        own = {"head_dim": values["global_head_dim"], "num_key_value_heads": count}
    count, size = own.get("num_key_value_heads"), own.get("head_dim")
    return _Heads(int(count or base.number), int(size or base.size))


def metadata_kinds(stated: StatedMetadata) -> tuple[list[LayerKind], Rope, _Heads]:
    """Returns that of each layer, the rope of those that see all, and what heads of others have."""
    types, counts = stated.layer_types(_PERIOD), stated.kv_heads_of_layers()
    local_heads = (count for count, of_type in zip(counts, types, strict=False) if of_type != FULL)
    size = int(stated.require("attention.key_length_swa", int))
    base = _Heads(next(local_heads, stated.num_kv_heads), size)
    has_keys_alone = any(
        of_type == FULL and f"model.layers.{layer}.self_attn.v_proj.weight" not in stated.tensors
        for layer, of_type in enumerate(types[: _num_own(stated)])
    )
    full = stated.rope()
    local = Rope(stated.get("rope.freq_base_swa", float) or full.theta)
    window = int(stated.require("attention.sliding_window", int))
    kinds = [
        _kind(full, None, _Heads(count, stated.head_dim()), base, has_keys_alone)
        if of_type == FULL
        else _kind(local, window, _Heads(count, size), base, False)
        for count, of_type in zip(counts, types, strict=False)
    ]
    return kinds, full, base


def _num_own(stated: StatedMetadata) -> int:
    """Counts the layers with keys and values."""
    return stated.num_layers - (stated.get("attention.shared_kv_layers", int) or 0)


def _gemma4_metadata(stated: StatedMetadata) -> Fields:
    kinds, full, base = metadata_kinds(stated)
    hidden = int(stated.require("embedding_length", int))
    sizes = stated.intermediate_sizes()
    experts: Fields = {}
    if stated.get("expert_count", int):
        keys = ("expert_feed_forward_length", "expert_count", "expert_used_count")
        numbers = (int(stated.require(key, int)) for key in keys)
        experts = _experts(hidden, next(iter(sizes), 0), *numbers)
    return {
        **_gemma4_common(hidden, stated.get("embedding_length_per_layer_input", int) or 0),
        **_of_layers(kinds, _num_own(stated), sizes),
        **experts,
        "head_dim": base.size,
        "num_kv_heads": base.number,
        "rope_theta": full.theta,
        "rope_scaling": None,
        "logit_softcap": stated.get("final_logit_softcapping", float),
    }


def _kind(
    rope: Rope, window: int | None, heads: _Heads, base: _Heads, has_keys_alone: bool
) -> LayerKind:
    return LayerKind(
        rope,
        window,
        head_dim=None if heads.size == base.size else heads.size,
        num_kv_heads=None if heads.number == base.number else heads.number,
        keys_as_values=has_keys_alone and window is None,
    )


def _of_layers(kinds: Sequence[LayerKind], num_own: int, sizes: Sequence[int]) -> Fields:
    """num_own: how many layers have keys and values; sizes: of their MLPs."""
    used = tuple(dict.fromkeys(kinds))
    return {
        "layer_kinds": used,
        "kind_of_layer": tuple(used.index(kind) for kind in kinds),
        "kv_sources": kv_sources(kinds, num_own),
        "intermediate_sizes": tuple(sizes) if len(set(sizes)) > 1 else (),
    }


def _experts(hidden_size: int, mlp_size: int, size: int, count: int, used: int) -> Fields:
    """size: of one of them."""
    experts = Experts(
        dense_size=mlp_size, beside_mlp=True, score_scale=hidden_size**-0.5, expert_scales=True
    )
    return {
        "intermediate_size": size,
        "num_experts": count,
        "experts_used": used,
        "experts": experts,
    }


def _of_tensors(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return each_expert(config, {_our_name(name): each for name, each in stored.items()})


def _our_name(name: str) -> str:
    for stated, ours in _OF_EXPERTS.items():
        if name.endswith(stated):
            return name.removesuffix(stated) + ours
    return name


def _gemma4_common(hidden_size: int, embedding_size: int) -> Fields:
    embeddings = LayerEmbeddings(
        embedding_size,
        scale=embedding_size**0.5,
        projected_scale=hidden_size**-0.5,
        sum_scale=2**-0.5,
    )
    return {
        "layer_embeddings": embeddings if embedding_size else None,
        "attention_scale": 1.0,
        "embedding_scale": hidden_size**0.5,
        "norm_places": "around",
        "activation": "gelu_tanh",
        "value_norm": True,
        "layer_scale": True,
    }


GEMMA4 = Family(
    model_types=("gemma4_text", "gemma4"),
    architectures=("gemma4",),
    of_config=_gemma4,
    of_metadata=_gemma4_metadata,
    defaults={
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPES,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
    },
    parts={
        **NORMS,
        "router.proj": "mlp.router",
        "post_feedforward_layernorm_1": "mlp.dense_post_norm",
        "post_feedforward_layernorm_2": "mlp.experts_post_norm",
        "pre_feedforward_layernorm_2": "mlp.experts_norm",
    },
    gguf_parts={
        **GGUF_POST_NORMS,
        **GGUF_EXPERTS,
        "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
        "ffn_gate_inp.scale": "mlp.router_norm.weight",
        "ffn_down_exps.scale": "mlp.expert_scale",
        "post_ffw_norm_1": "mlp.dense_post_norm",
        "post_ffw_norm_2": "mlp.experts_post_norm",
        "pre_ffw_norm_2": "mlp.experts_norm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
    },
    others={
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
    prefixes=TEXT_PREFIXES,
    ignored=(*PICTURES, *_OTHER_INPUTS),
    computes=(EXPERTS,),
    of_tensors=_of_tensors,
)
