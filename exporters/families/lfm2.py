"""LFM2 (Liquid AI 2025): short convolutions in most layers, attention in the others; and LFM2 with
experts (LFM2-8B-A1B) in all layers but the first ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Experts, LayerKind
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import (
    CONVOLUTION,
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    MAX_LAYERS,
    SHORT_CONVOLUTIONS,
    GgufKeys,
    StatedConfig,
    of_types,
)
from edge_spec.exporters.stored_tensor import StoredTensor

_SIGMOID = 2  # as GGUF numbers what makes weights of a router's scores


def _of_config(stated: StatedConfig) -> Fields:
    return {**_layers_of_config(stated), "intermediate_size": _intermediate_size(stated)}


def _layers_of_config(stated: StatedConfig) -> Fields:
    """Returns the fields that say which layers attend and which have convolutions."""
    values = stated.values
    layers = range(min(int(values["num_hidden_layers"]), MAX_LAYERS))
    types = values.get("layer_types")
    if not types:  # as older files have it
        attending = values.get("full_attn_idxs", layers)
        types = [FULL if layer in attending else CONVOLUTION for layer in layers]
    convolution = LayerKind(None, convolution=int(values["conv_L_cache"]))
    kinds = {FULL: LayerKind(stated.rope()), CONVOLUTION: convolution}
    return {**of_types(kinds, types), "qk_norm": True}


def _intermediate_size(stated: StatedConfig) -> int:
    """Two thirds of what is stated, in whole multiples, unless it says that this was done."""
    values = stated.values
    size = int(values["intermediate_size"])
    if not values["block_auto_adjust_ff_dim"]:
        return size
    size, multiple = 2 * size // 3, int(values["block_multiple_of"])
    if values["block_ffn_dim_multiplier"] is None:
        return size
    return -(-int(values["block_ffn_dim_multiplier"] * size) // multiple) * multiple


def _of_gguf(keys: GgufKeys, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer without keys and values has a convolution."""
    counts = keys.per_layer("attention.head_count_kv", values["num_attention_heads"])
    return {"layer_types": [FULL if count else CONVOLUTION for count in counts]}


def _channels_alone(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Convolutions of one channel each, without the axis of that one."""
    return {
        name: replace(tensor, shape=(tensor.shape[0], *tensor.shape[2:]))
        if name.endswith(".conv.conv.weight") and tensor.shape[1:2] == (1,)
        else tensor
        for name, tensor in tensors.items()
    }


LFM2 = Family(
    model_types=("lfm2",),
    architectures=("lfm2",),
    of_config=_of_config,
    of_gguf=_of_gguf,
    defaults={
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    gguf_defaults={"block_auto_adjust_ff_dim": False},
    keys={
        "rms_norm_eps": "norm_eps",
        "intermediate_size": "block_ff_dim",
        "tie_word_embeddings": "tie_embedding",
    },
    rules=(
        (r"^model\.embedding_norm\.", "model.norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.(q|k)_layernorm\.", r".\1_norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.feed_forward\.gate\.", ".mlp.router."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    ),
    gguf_parts={
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    gguf_others={"token_embd_norm.weight": "model.norm.weight"},
    computes=(SHORT_CONVOLUTIONS,),
    of_tensors=_channels_alone,
)


def _moe_config(stated: StatedConfig) -> Fields:
    values = stated.values
    experts = Experts(
        normalized=bool(values["norm_topk_prob"]),
        sigmoid=True,
        choice_bias=bool(values["use_expert_bias"]),
        scale=float(values["routed_scaling_factor"]),
    )
    dense_layers = int(values["num_dense_layers"])
    if dense_layers:  # the first ones, which have one MLP of this size
        dense_size = int(values["intermediate_size"])
        experts = replace(experts, dense_layers=dense_layers, dense_size=dense_size)
    return {**_layers_of_config(stated), **stated.mixture(experts)}


def _moe_of_gguf(keys: GgufKeys, values: Mapping[str, Any]) -> Mapping[str, Any]:
    gate = keys.require("expert_gating_func", int)
    if gate != _SIGMOID:
        raise UnsupportedModelError(
            f"{keys.metadata.path} weighs its experts by the function {gate}, not by a sigmoid",
            remedy="Convert the model again.",
        )
    has_bias = any(name.endswith(".expert_bias") for name in keys.tensors)
    return {**_of_gguf(keys, values), "use_expert_bias": has_bias}


LFM2_MOE = Family(
    model_types=("lfm2_moe",),
    architectures=("lfm2moe",),
    of_config=_moe_config,
    of_gguf=_moe_of_gguf,
    defaults={
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_expert_bias": True,
    },
    gguf_defaults={"num_dense_layers": 0},
    keys={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    rules=LFM2.rules,
    gguf_parts={
        **LFM2.gguf_parts,
        **GGUF_EXPERTS,
        "exp_probs_b.bias": "mlp.expert_bias",
    },
    gguf_others=LFM2.gguf_others,
    computes=(EXPERTS, SHORT_CONVOLUTIONS),
    of_tensors=_channels_alone,
)
FAMILIES = (LFM2, LFM2_MOE)
