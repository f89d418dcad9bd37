"""Gemma 2 and 3 (Gemma Team 2024, 2025) and Gemma 4 (Google 2026), text only; Gemma 4 also with
experts in parallel to its MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Experts, LayerEmbeddings, LayerKind
from edge_spec.exporters.families.family import (
    PICTURES,
    TEXT_RULES,
    Family,
    Fields,
    raised,
)
from edge_spec.exporters.families.stated import (
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    GGUF_POST_NORMS,
    SLIDING,
    GgufKeys,
    StatedConfig,
    kv_sources,
)
from edge_spec.exporters.stored_tensor import StoredTensor

# The last of this many layers has full attention; by generation.
_PERIODS = {2: 2, 3: 6, 4: 6}
_LAYERS_OF_27B = (46, 62)  # scale queries by a width that is missing in GGUF
_RULES = (
    *TEXT_RULES,
    (r"\.post_attention_layernorm\.", ".self_attn.post_norm."),
    (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".mlp.post_norm."),
)
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


def _of_config(generation: int, stated: StatedConfig) -> Fields:
    values = stated.values
    full = local = stated.rope(FULL)
    if generation == 3:
        local = stated.rope(SLIDING, "rope_local_base_freq", scaled=False)
    return {
        **stated.alternating(_PERIODS[generation], local, full),
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "norm_places": "around",
        "activation": "gelu_tanh",
        "embedding_scale": int(values["hidden_size"]) ** 0.5,
        "attention_scale": float(values["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": stated.optional("attn_logit_softcapping"),
        "logit_softcap": stated.optional("final_logit_softcapping"),
    }


def _of_gguf(keys: GgufKeys, values: Mapping[str, Any]) -> Mapping[str, Any]:
    width = values["head_dim"]
    if values["num_hidden_layers"] in _LAYERS_OF_27B:
        width = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": width}


def _whole_norms(
    config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Add 1 to the norm weights: safetensors store them less 1."""
    return {
        name: raised(tensor, 1.0) if name.endswith("norm.weight") else tensor
        for name, tensor in stored.items()
    }


GEMMA2 = Family(
    model_types=("gemma2",),
    architectures=("gemma2",),
    of_config=partial(_of_config, 2),
    of_gguf=_of_gguf,
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    rules=_RULES,
    gguf_parts=GGUF_POST_NORMS,
    of_tensors=_whole_norms,
)
GEMMA3 = replace(
    GEMMA2,
    model_types=("gemma3_text", "gemma3"),
    architectures=("gemma3",),
    of_config=partial(_of_config, 3),
    defaults=_DEFAULTS | _DEFAULTS_OF_THIRD,
    ignored=PICTURES,
)
FAMILIES = (GEMMA2, GEMMA3)


_OTHER_INPUTS = ("model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def stated_kinds(stated: StatedConfig) -> list[LayerKind]:
    """Return the kind of each layer."""
    values = stated.values
    types = [*stated.layer_types(_PERIODS[4])[:-1], FULL]  # the last layer is always FULL
    usual_count, usual_size = int(values["num_key_value_heads"]), stated.head_dim
    has_keys_alone = bool(values["attention_k_eq_v"])
    kinds = []
    for layer, of_type in enumerate(types):
        own = _own_heads(values, layer, of_type)
        count = int(own.get("num_key_value_heads") or usual_count)
        size = int(own.get("head_dim") or usual_size)
        kind = LayerKind(
            stated.rope(of_type, head_dim=size),
            None if of_type == FULL else int(values["sliding_window"]),
            head_dim=None if size == usual_size else size,
            num_kv_heads=None if count == usual_count else count,
            keys_as_values=has_keys_alone and of_type == FULL,
        )
        kinds.append(kind)
    return kinds


def _own_heads(values: Mapping[str, Any], layer: int, of_type: str) -> Mapping[str, Any]:
    if values.get("per_layer_config"):  # where transformers 5 keeps it
        return values["per_layer_config"].get(str(layer)) or {}
    if of_type != FULL:
        return {}
    count = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
    return {"head_dim": values["global_head_dim"], "num_key_value_heads": count}


def _gemma4(stated: StatedConfig) -> Fields:
    values, kinds = stated.values, stated_kinds(stated)
    num_own = len(kinds) - int(values["num_kv_shared_layers"])
    inner, hidden = int(values["intermediate_size"]), int(values["hidden_size"])
    wider = 2 * inner if values["use_double_wide_mlp"] else inner
    sizes = values.get("intermediate_sizes", [inner] * num_own + [wider] * (len(kinds) - num_own))
    used = tuple(dict.fromkeys(kinds))
    size = int(values["hidden_size_per_layer_input"] or 0)
    embeddings = LayerEmbeddings(
        size, scale=size**0.5, projected_scale=hidden**-0.5, sum_scale=2**-0.5
    )
    experts = Experts(
        dense_size=inner, beside_mlp=True, score_scale=hidden**-0.5, expert_scales=True
    )
    return {
        "layer_kinds": used,
        "kind_of_layer": tuple(used.index(kind) for kind in kinds),
        "kv_sources": kv_sources(kinds, num_own),
        "intermediate_sizes": tuple(sizes) if len(set(sizes)) > 1 else (),
        "layer_embeddings": embeddings if size else None,
        "attention_scale": 1.0,
        "embedding_scale": hidden**0.5,
        "norm_places": "around",
        "activation": "gelu_tanh",
        "value_norm": True,
        "layer_scale": True,
        "rope_theta": stated.rope(FULL).theta,
        "rope_scaling": None,
        "logit_softcap": stated.optional("final_logit_softcapping"),
        **(stated.mixture(experts) if values["enable_moe_block"] else {}),
    }


def gemma4_of_gguf(keys: GgufKeys, values: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = StatedConfig(values, keys.path)
    types = stated.layer_types(_PERIODS[4])
    counts = keys.per_layer("attention.head_count_kv", values["num_attention_heads"])
    num_shared = keys.get("attention.shared_kv_layers", int) or 0
    size, local_size = values["head_dim"], int(keys.require("attention.key_length_swa", int))
    kinds = list(zip(types, counts, strict=False))
    full = {"rope_theta": values["rope_theta"], **(values["rope_scaling"] or {})}
    local_theta = values.get("rope_local_base_freq") or values["rope_theta"]
    return {
        "layer_types": types,
        "per_layer_config": {
            str(layer): {
                "head_dim": size if of_type == FULL else local_size,
                "num_key_value_heads": count,
            }
            for layer, (of_type, count) in enumerate(kinds)
        },
        "head_dim": local_size,
        "num_key_value_heads": next(
            (count for of_type, count in kinds if of_type != FULL), max(counts, default=0)
        ),
        "attention_k_eq_v": any(
            of_type == FULL and f"model.layers.{layer}.self_attn.v_proj.weight" not in keys.tensors
            for layer, of_type in enumerate(types[: len(counts) - num_shared])
        ),
        "num_kv_shared_layers": num_shared,
        "rope_parameters": {FULL: full, SLIDING: {"rope_theta": local_theta}},
        "rope_scaling": None,
        "rotary_dim": None,
        "intermediate_sizes": keys.per_layer("feed_forward_length"),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", int),
        "enable_moe_block": "num_experts" in values,
    }


GEMMA4 = Family(
    model_types=("gemma4_text", "gemma4"),
    architectures=("gemma4",),
    of_config=_gemma4,
    of_gguf=gemma4_of_gguf,
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
    keys={"num_experts_per_tok": "top_k_experts"},
    rules=(
        *_RULES,
        (r"\.router\.proj\.", ".mlp.router."),
        (r"\.router\.scale$", ".mlp.router_norm.weight"),
        (r"\.router\.per_expert_scale$", ".mlp.expert_scale"),
        (r"\.experts\.(gate_up|down)_proj$", r".mlp.experts.\1_proj.weight"),
        (r"\.post_feedforward_layernorm_1\.", ".mlp.dense_post_norm."),
        (r"\.post_feedforward_layernorm_2\.", ".mlp.experts_post_norm."),
        (r"\.pre_feedforward_layernorm_2\.", ".mlp.experts_norm."),
    ),
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
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
    ignored=(*PICTURES, *_OTHER_INPUTS),
    computes=(EXPERTS,),
)
