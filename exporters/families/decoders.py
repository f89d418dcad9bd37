"""Decoder families that differ from Llama in fields and names, and three with parts of their own:
gpt-oss (OpenAI 2025), LFM2 and LFM2-8B-A1B (Liquid AI 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import SWISH_SLOPE, Experts, LayerKind
from edge_spec.core.rope import Rope
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.families.family import PICTURES, TEXT_RULES, Family, Fields
from edge_spec.exporters.families.stated import (
    CONVOLUTION,
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    GGUF_POST_NORMS,
    MAX_LAYERS,
    SHORT_CONVOLUTIONS,
    SLIDING,
    GgufKeys,
    StatedConfig,
    last_of,
    of_types,
)
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

_PERIOD = 4  # the last of so many layers has full attention, or no positions


def _llama(stated: StatedConfig) -> Fields:
    """End the context at the window, within which sliding attention equals full attention."""
    window = stated.values.get("sliding_window")
    if not window or not stated.values.get("use_sliding_window", True):
        return {}
    return {"context_length": min(stated.context_length, int(window))}


def _granite(stated: StatedConfig) -> Fields:
    """Granite's multipliers, from muP (Yang et al. 2022)."""
    return {
        "embedding_scale": stated.number("embedding_multiplier", 1.0),
        "residual_scale": stated.number("residual_multiplier", 1.0),
        "attention_scale": stated.optional("attention_multiplier"),
        "logit_scale": 1 / stated.number("logits_scaling", 1.0),
    }


def _granite_hybrid(stated: StatedConfig) -> Fields:
    """Granite 4 without recurrent layers and experts: the shared MLP is its only one."""
    inner = int(stated.values["shared_intermediate_size"])
    fields = {**_granite(stated), "intermediate_size": inner}
    if stated.values.get("position_embedding_type") == "rope":
        return fields
    return {**fields, "layer_kinds": (LayerKind(None),)}


def _smollm3(stated: StatedConfig) -> Fields:
    """Every fourth layer has no positions (Yang et al. 2025, "Rope to Nope and Back Again")."""
    values = stated.values
    if values.get("use_sliding_window"):
        raise stated.refuse("a sliding window")
    rotates = values.get("no_rope_layers")  # 1: this layer rotates
    if rotates is None:
        interval = int(values.get("no_rope_layer_interval", _PERIOD))
        types = last_of(interval, int(values["num_hidden_layers"]))
        rotates = [each != FULL for each in types]
    kinds = {"rope": LayerKind(stated.rope()), "none": LayerKind(None)}
    return of_types(kinds, ["rope" if each else "none" for each in rotates])


def _minicpm(stated: StatedConfig) -> Fields:
    """Compute the multipliers; GGUF stores them, as for Granite."""
    values = stated.values
    layers, hidden = int(values["num_hidden_layers"]), int(values["hidden_size"])
    depth = stated.number("scale_depth", 1.0) / layers**0.5
    width = hidden / int(values.get("dim_model_base", 1))
    return {
        "embedding_scale": stated.number("embedding_multiplier", stated.number("scale_emb", 1.0)),
        "residual_scale": stated.number("residual_multiplier", depth),
        "logit_scale": 1 / stated.number("logits_scaling", width),
    }


def _phi(stated: StatedConfig) -> Fields:
    window = stated.values.get("sliding_window")
    if not window or int(window) >= stated.context_length:
        return {}
    return {"layer_kinds": (LayerKind(stated.rope(), int(window)),)}


def _olmo(stated: StatedConfig) -> Fields:
    full, local = stated.rope(FULL), stated.rope(SLIDING, scaled=False)
    return {
        **_normed_after(stated, local, full),
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "qk_norm_whole": True,
    }


def _exaone4(stated: StatedConfig) -> Fields:
    """Sliding layers have positions, full ones none. If no layer slides, all have positions."""
    return _normed_after(stated, stated.rope(), None)


def _normed_after(stated: StatedConfig, local: Rope, full: Rope | None) -> Fields:
    """Norms after sublayers. Without a window, no layer slides."""
    slides = bool(stated.values.get("sliding_window"))
    kinds = stated.alternating(_PERIOD, local, full) if slides else {}
    return {"norm_places": "after", **kinds}


def _ministral(stated: StatedConfig) -> Fields:
    """End the context at the original length, within which queries are not scaled."""
    fields = _llama(stated)
    beta = "llama_4_scaling_beta"
    if not (stated.of_rope.get(beta) or stated.values.get(beta)):
        return fields
    length = fields.get("context_length", stated.context_length)
    return {**fields, "context_length": min(length, stated.original_length)}


def _qwen_moe(stated: StatedConfig) -> Fields:
    values = stated.values
    if int(values["decoder_sparse_step"]) != 1 or values["mlp_only_layers"]:
        raise stated.refuse("experts in some layers alone")
    return stated.mixture(Experts(normalized=bool(values["norm_topk_prob"])))


_POST_NORMS: Any = {
    "rules": (
        (r"\.post_attention_layernorm\.", ".self_attn.post_norm."),
        (r"\.post_feedforward_layernorm\.", ".mlp.post_norm."),
    ),
    "gguf_parts": GGUF_POST_NORMS,
}
FAMILIES = (
    # llama.cpp permutes q and k of "llama" (also Mistral) for its interleaved rotation
    # (convert_hf_to_gguf, LlamaModel.permute); Qwen keeps Hugging Face's order.
    Family(("llama", "mistral"), ("llama",), _llama, is_permuted=True),
    # MiMo is Qwen 2 plus layers for multi-token prediction.
    Family(("qwen2", "qwen3", "mimo"), ("qwen2", "qwen3"), _llama),
    Family(
        ("granite",),
        ("granite",),
        _granite,
        defaults={"attention_multiplier": 1.0},
        gguf_defaults={"attention_multiplier": None},
        is_permuted=True,
    ),
    Family(
        ("granitemoehybrid",),
        (),
        _granite_hybrid,
        defaults={
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "position_embedding_type": None,
        },
        rules=(
            (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
            (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
        ),
    ),
    Family(
        ("smollm3",),
        ("smollm3",),
        _smollm3,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
        is_permuted=True,
    ),
    Family(  # Hu et al. 2024
        ("minicpm",),
        ("minicpm",),
        _minicpm,
        defaults={"tie_word_embeddings": True},
        # Missing in older files; llama.cpp then uses those of the 2B model.
        gguf_defaults={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
        is_permuted=True,
    ),
    # Phi-3, 3.5 and 4-mini (Abdin et al. 2024): fused matrices, partial rotation, LongRoPE.
    Family(("phi3",), ("phi3",), _phi, gguf_parts={"ffn_up": "mlp.gate_up_proj"}),
    # As GGUF, OLMo 3 is an olmo2 with a window.
    Family(("olmo2",), ("olmo2",), _olmo, **_POST_NORMS),
    Family(("olmo3",), (), _olmo, defaults={"rope_theta": 5e5}, **_POST_NORMS),
    Family(("exaone4",), ("exaone4",), _exaone4, **_POST_NORMS),
    Family(
        ("hunyuan_v1_dense",),
        ("hunyuan-dense",),
        lambda stated: {"qk_norm_after_rope": True},
        rules=((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm.")),
    ),
    Family(
        ("ministral3", "mistral3"),
        ("mistral3",),
        _ministral,
        is_permuted=True,
        rules=TEXT_RULES,
        ignored=PICTURES,
    ),
    Family(
        ("qwen3_moe",),
        ("qwen3moe",),
        _qwen_moe,
        defaults={"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False},
        gguf_defaults={"norm_topk_prob": True},  # llama.cpp always normalizes
        rules=((r"\.mlp\.gate\.", ".mlp.router."),),
        gguf_parts=GGUF_EXPERTS,
        computes=(EXPERTS,),
    ),
)


_BLOCK, _BLOCK_BYTES = 32, 16  # weights that share a scale; their bytes without it
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_MATRICES = ("gate_up_proj", "down_proj")
_LIMIT = 7.0  # clamp of gate and up; not in GGUF
_Rows = slice | np.ndarray


def _gpt_oss(stated: StatedConfig) -> Fields:
    values, rope = stated.values, stated.rope()
    if float(values["swiglu_alpha"]) != SWISH_SLOPE:
        raise stated.refuse(f"a slope of {values['swiglu_alpha']} in its experts")
    return {
        **stated.mixture(Experts(biases=True, clamp=float(values["swiglu_limit"]))),
        "attention_sinks": True,
        **stated.alternating(2, rope, rope),
    }


def _of_experts(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Split the experts: MXFP4 blocks and scales, or transposed matrices. Rows of gate and up
    alternate; ours follow each other."""
    found = {}
    for name, tensor in stored.items():
        prefix, is_expert, part = name.partition(".mlp.experts.")
        whole = part.removesuffix(_BLOCKS).removesuffix(_BIAS)
        if whole not in _MATRICES:
            if not part.endswith(_SCALES):  # read with their blocks
                found[name] = tensor
            continue
        scales = stored.get(f"{prefix}{is_expert}{whole}{_SCALES}")
        _require_experts(name, tensor, scales, config)
        ending = "bias" if part.endswith(_BIAS) else "weight"
        for expert in range(config.num_experts):
            own = _of_expert(part, tensor, scales, expert)
            if whole == _MATRICES[0]:
                count = own.shape[0]
                own = own.in_order(np.r_[0:count:2, 1:count:2])
            found[f"{prefix}{is_expert}{expert}.{whole}.{ending}"] = own
    return found


def _of_expert(
    part: str, tensor: StoredTensor, scales: StoredTensor | None, expert: int
) -> StoredTensor:
    data = tensor.data[expert]
    if part.endswith(_BIAS):
        return StoredTensor(tensor.shape[1:], tensor.kind, data)
    if part.endswith(_BLOCKS) and scales is not None:
        shape = (len(data), data.shape[1] * _BLOCK)
        read = partial(_as_ggml, scales.data[expert], data)
        return StoredTensor(shape, GGMLQuantizationType.MXFP4, data, read_rows=read)
    columns, rows = tensor.shape[1:]
    items = data.reshape(columns, rows, -1)
    return StoredTensor((rows, columns), tensor.kind, items, read_rows=partial(_turned, items))


def _require_experts(
    name: str, tensor: StoredTensor, scales: StoredTensor | None, config: ModelConfig
) -> None:
    sizes = 2 if name.endswith(_BIAS) else 4 if name.endswith(_BLOCKS) else 3
    if len(tensor.shape) != sizes or tensor.shape[0] != config.num_experts:
        raise damaged(
            f"tensor {name} has the shape {list(tensor.shape)}, expected {config.num_experts} "
            "experts"
        )
    if sizes == 4 and (scales is None or (*scales.shape, _BLOCK_BYTES) != tensor.shape):
        raise damaged(f"tensor {name} has no scale for each block of {_BLOCK_BYTES} bytes")


def _as_ggml(scales: np.ndarray, blocks: np.ndarray, rows: _Rows) -> np.ndarray:
    """Repack MXFP4 for ggml, where a byte holds weights half a block apart, not neighbours.

    blocks: [rows, blocks, bytes], scales: [rows, blocks].
    """
    stored = blocks[rows]
    values = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:2], _BLOCK)
    low, high = np.split(values, 2, axis=-1)
    packed = np.concatenate([scales[rows][..., None], low | high << 4], axis=-1)
    return packed.reshape(len(packed), -1)


def _turned(items: np.ndarray, rows: _Rows) -> np.ndarray:
    """Return rows [rows, bytes] of `items`, [columns, rows, bytes of one]."""
    turned = np.ascontiguousarray(items[:, rows].swapaxes(0, 1))
    return turned.reshape(len(turned), -1)


GPT_OSS = Family(
    model_types=("gpt_oss",),
    architectures=("gpt-oss",),
    of_config=_gpt_oss,
    defaults={"swiglu_alpha": SWISH_SLOPE, "swiglu_limit": _LIMIT},
    gguf_parts={
        **GGUF_EXPERTS,
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
    computes=(EXPERTS,),
    of_tensors=_of_experts,
)


_SIGMOID = 2  # GGUF's number of the router's gating function


def _lfm2(stated: StatedConfig) -> Fields:
    values = stated.values
    layers = range(min(int(values["num_hidden_layers"]), MAX_LAYERS))
    types = values.get("layer_types")
    if not types:  # older files
        attending = values.get("full_attn_idxs", layers)
        types = [FULL if layer in attending else CONVOLUTION for layer in layers]
    convolution = LayerKind(None, convolution=int(values["conv_L_cache"]))
    kinds = {FULL: LayerKind(stated.rope()), CONVOLUTION: convolution}
    fields = {**of_types(kinds, types), "qk_norm": True}
    if not values.get("num_experts"):
        return {**fields, "intermediate_size": _intermediate_size(stated)}
    experts = Experts(
        normalized=bool(values["norm_topk_prob"]),
        sigmoid=True,
        choice_bias=bool(values["use_expert_bias"]),
        scale=float(values["routed_scaling_factor"]),
    )
    dense_layers = int(values["num_dense_layers"])
    if dense_layers:  # the first layers have a single MLP
        dense_size = int(values["intermediate_size"])
        experts = replace(experts, dense_layers=dense_layers, dense_size=dense_size)
    return {**fields, **stated.mixture(experts)}


def _intermediate_size(stated: StatedConfig) -> int:
    """Return 2/3 of config.json's width, rounded up to a multiple, unless already adjusted."""
    values = stated.values
    size = int(values["intermediate_size"])
    if not values["block_auto_adjust_ff_dim"]:
        return size
    size, multiple = 2 * size // 3, int(values["block_multiple_of"])
    if values["block_ffn_dim_multiplier"] is None:
        return size
    return -(-int(values["block_ffn_dim_multiplier"] * size) // multiple) * multiple


def _lfm2_of_gguf(keys: GgufKeys, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer without KV heads is a convolution."""
    counts = keys.per_layer("attention.head_count_kv", values["num_attention_heads"])
    gate = keys.require("expert_gating_func", int) if "num_experts" in values else _SIGMOID
    if gate != _SIGMOID:
        raise UnsupportedModelError(
            f"{keys.path} weighs its experts by the function {gate}, not by a sigmoid",
            remedy="Convert the model again.",
        )
    return {
        "layer_types": [FULL if count else CONVOLUTION for count in counts],
        "use_expert_bias": any(name.endswith(".expert_bias") for name in keys.tensors),
    }


def _channels_alone(
    config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Drop the channel axis of depthwise convolutions, which is 1."""
    return {
        name: replace(tensor, shape=(tensor.shape[0], *tensor.shape[2:]))
        if name.endswith(".conv.conv.weight") and tensor.shape[1:2] == (1,)
        else tensor
        for name, tensor in tensors.items()
    }


LFM2 = Family(
    model_types=("lfm2", "lfm2_moe"),
    architectures=("lfm2", "lfm2moe"),
    of_config=_lfm2,
    of_gguf=_lfm2_of_gguf,
    defaults={
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_expert_bias": True,
    },
    gguf_defaults={"block_auto_adjust_ff_dim": False, "num_dense_layers": 0},
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
        **GGUF_EXPERTS,
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "exp_probs_b.bias": "mlp.expert_bias",
        "token_embd_norm.weight": "model.norm.weight",
    },
    computes=(EXPERTS, SHORT_CONVOLUTIONS),
    of_tensors=_channels_alone,
)
