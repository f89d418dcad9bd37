"""LFM2 (Liquid AI 2025): short convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from edge_spec.core.config import LayerKind, ModelConfig
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.layers import FULL, MAX_LAYERS, of_types
from edge_spec.exporters.families.stated import CONVOLUTION, SHORT_CONVOLUTIONS, StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata
from edge_spec.exporters.stored_tensor import StoredTensor


def _of_config(stated: StatedConfig) -> Fields:
    return {**layers_of_config(stated), "intermediate_size": _intermediate_size(stated)}


def layers_of_config(stated: StatedConfig) -> Fields:
    """Returns the fields that say which layers attend and which have convolutions."""
    values = stated.values
    layers = range(min(int(values["num_hidden_layers"]), MAX_LAYERS))
    types = values.get("layer_types")
    if not types:  # as older files have it
        attending = values.get("full_attn_idxs", layers)
        types = [FULL if layer in attending else CONVOLUTION for layer in layers]
    return _fields(stated.rope(), int(values["conv_L_cache"]), types)


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


def layers_of_metadata(stated: StatedMetadata) -> Fields:
    """Returns the same of a GGUF file."""
    types = [FULL if count else CONVOLUTION for count in stated.kv_heads_of_layers()]
    return _fields(stated.rope(), stated.require("shortconv.l_cache", int), types)


def _fields(rope: Rope, kernel: int, types: Sequence[str]) -> Fields:
    kinds = {FULL: LayerKind(rope), CONVOLUTION: LayerKind(None, convolution=kernel)}
    return {**of_types(kinds, types), "qk_norm": True}


def channels_alone(
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
    of_metadata=layers_of_metadata,
    defaults=MappingProxyType(
        {
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        }
    ),
    keys={
        "rms_norm_eps": "norm_eps",
        "intermediate_size": "block_ff_dim",
        "tie_word_embeddings": "tie_embedding",
    },
    parts={
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "self_attn.out_proj": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
    gguf_parts={
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    others={
        "model.embedding_norm.weight": "model.norm.weight",
        "token_embd_norm.weight": "model.norm.weight",
    },
    computes=(SHORT_CONVOLUTIONS,),
    of_tensors=channels_alone,
)
