"""Families of decoders that differ from Llama in a few fields and names: `FAMILIES` has a row of
each, and before it stand the functions that read what only some of them state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_spec.core.model_parts import Experts, LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import PICTURES, TEXT_PREFIXES, Family, Fields
from edge_spec.exporters.families.stated import (
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    GGUF_POST_NORMS,
    MAX_LAYERS,
    SLIDING,
    StatedConfig,
    StatedMetadata,
    of_types,
)

_PERIOD = 4  # of layers, of which the last sees all, or has no positions


def _llama(stated: StatedConfig) -> Fields:
    window = stated.values.get("sliding_window")
    if not window or not stated.values.get("use_sliding_window", True):
        return {}
    return _within(int(window), stated.context_length)


def _llama_metadata(stated: StatedMetadata) -> Fields:
    window = stated.get("attention.sliding_window", int)
    return _within(window, stated.context_length) if window else {}


def _within(window: int, context_length: int) -> Fields:
    """Ends the context with a window, within which sliding attention is full attention."""
    return {"context_length": min(context_length, window)}


def _granite(stated: StatedConfig) -> Fields:
    """Granite's multipliers come from muP (Yang et al. 2022)."""
    values = stated.values
    return {
        "embedding_scale": float(values.get("embedding_multiplier", 1.0)),
        "residual_scale": float(values.get("residual_multiplier", 1.0)),
        "attention_scale": float(values.get("attention_multiplier", 1.0)),
        "logit_scale": 1 / float(values.get("logits_scaling", 1.0)),
    }


def _granite_metadata(stated: StatedMetadata) -> Fields:
    return {
        "embedding_scale": stated.get("embedding_scale", float) or 1.0,
        "residual_scale": stated.get("residual_scale", float) or 1.0,
        "attention_scale": stated.get("attention.scale", float) or None,
        "logit_scale": 1 / (stated.require("logit_scale", float) or 1.0),
    }


def _granite_hybrid(stated: StatedConfig) -> Fields:
    """Granite 4 without recurrent layers and experts: its one MLP is the one that they would
    share."""
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
    rotates = values.get("no_rope_layers")  # 1: this layer does
    if rotates is None:
        interval = int(values.get("no_rope_layer_interval", _PERIOD))
        rotates = _all_but_last_of(interval, int(values["num_hidden_layers"]))
    return _rotating(stated.rope(), rotates)


def _smollm3_metadata(stated: StatedMetadata) -> Fields:
    return _rotating(stated.rope(), _all_but_last_of(_PERIOD, stated.num_layers))


def _all_but_last_of(interval: int, num_layers: int) -> list[bool]:
    return [(layer + 1) % interval != 0 for layer in range(min(num_layers, MAX_LAYERS))]


def _rotating(rope: Rope, rotates: Sequence[object]) -> Fields:
    kinds = {"rope": LayerKind(rope), "none": LayerKind(None)}
    return of_types(kinds, ["rope" if each else "none" for each in rotates])


def _minicpm(stated: StatedConfig) -> Fields:
    values = stated.values
    layers, hidden = int(values["num_hidden_layers"]), int(values["hidden_size"])
    return {
        "embedding_scale": float(values.get("scale_emb", 1.0)),
        "residual_scale": float(values.get("scale_depth", 1.0)) / layers**0.5,
        "logit_scale": int(values.get("dim_model_base", 1)) / hidden,
    }


def _minicpm_metadata(stated: StatedMetadata) -> Fields:
    """Older files state none of them: llama.cpp takes those of the 2B model then."""
    layers, hidden = stated.num_layers, int(stated.require("embedding_length", int))
    return {
        "embedding_scale": stated.get("embedding_scale", float) or 12.0,
        "residual_scale": stated.get("residual_scale", float) or 1.4 / layers**0.5,
        "logit_scale": 1 / (stated.get("logit_scale", float) or hidden / 256),
    }


def _phi(stated: StatedConfig) -> Fields:
    return _phi_fields(stated.rope(), stated.context_length, stated.values.get("sliding_window"))


def _phi_metadata(stated: StatedMetadata) -> Fields:
    window = stated.get("attention.sliding_window", int)
    return _phi_fields(stated.rope(), stated.context_length, window)


def _phi_fields(rope: Rope, context_length: int, window: int | None) -> Fields:
    if not window or int(window) >= context_length:
        return {}
    return {"layer_kinds": (LayerKind(rope, int(window)),)}


def _olmo(stated: StatedConfig) -> Fields:
    full = stated.rope(FULL)
    fields = _normed_after(stated, full, stated.rope(SLIDING, scaled=False))
    stretched = {"rope_theta": full.theta, "rope_scaling": full.scaling}
    return {**fields, **stretched, "qk_norm_whole": True}


def _olmo_metadata(stated: StatedMetadata) -> Fields:
    rope = stated.rope()
    return {**_normed_after(stated, rope, Rope(rope.theta)), "qk_norm_whole": True}


def _exaone4(stated: StatedConfig | StatedMetadata) -> Fields:
    """Leaves out positions in all layers that do not slide, where some do."""
    return _normed_after(stated, None, stated.rope())


def _normed_after(stated: StatedConfig | StatedMetadata, full: Rope | None, local: Rope) -> Fields:
    window: int | None
    if isinstance(stated, StatedConfig):
        window = stated.values.get("sliding_window")
    else:
        window = stated.get("attention.sliding_window", int)
    if not window:
        return {"norm_places": "after"}
    kinds = {SLIDING: LayerKind(local, int(window)), FULL: LayerKind(full)}
    return {"norm_places": "after", **of_types(kinds, stated.layer_types(_PERIOD))}


def _hunyuan(stated: StatedConfig | StatedMetadata) -> Fields:
    return {"qk_norm_after_rope": True}


def _ministral(stated: StatedConfig) -> Fields:
    """Queries are as they are within the original length, which is all that runs."""
    fields = _llama(stated)
    rope = stated.values.get("rope_parameters") or {}
    if not rope.get("llama_4_scaling_beta"):
        return fields
    length = min(stated.context_length, int(rope["original_max_position_embeddings"]))
    return {**fields, "context_length": min(length, fields.get("context_length", length))}


def _ministral_metadata(stated: StatedMetadata) -> Fields:
    original = stated.get("rope.scaling.original_context_length", int)
    if not (original and stated.get("attention.temperature_scale", float)):
        return {}
    return _within(original, stated.context_length)


def _qwen_moe(stated: StatedConfig) -> Fields:
    values = stated.values
    if int(values["decoder_sparse_step"]) != 1 or values["mlp_only_layers"]:
        raise stated.refuse("experts in some layers alone")
    return {
        "intermediate_size": int(values["moe_intermediate_size"]),
        "num_experts": int(values.get("num_experts") or values["num_local_experts"]),
        "experts_used": int(values["num_experts_per_tok"]),
        "experts": Experts(normalized=bool(values["norm_topk_prob"])),
    }


def _qwen_moe_metadata(stated: StatedMetadata) -> Fields:
    """llama.cpp normalizes, whatever config.json said."""
    return stated.experts(Experts())


_POST_NORMS: Any = {
    "parts": {
        "post_attention_layernorm": "self_attn.post_norm",
        "post_feedforward_layernorm": "mlp.post_norm",
    },
    "gguf_parts": GGUF_POST_NORMS,
}
FAMILIES = (
    # llama.cpp stores q and k of "llama", as which it runs Mistral too, for its interleaved
    # rotation (convert_hf_to_gguf, LlamaModel.permute); the Qwen families keep the order of
    # Hugging Face.
    Family(("llama", "mistral"), ("llama",), _llama, _llama_metadata, is_permuted=True),
    # MiMo is Qwen 2 and layers of its own.
    Family(("qwen2", "qwen3", "mimo"), ("qwen2", "qwen3"), _llama, _llama_metadata),
    Family(("granite",), ("granite",), _granite, _granite_metadata, is_permuted=True),
    Family(
        ("granitemoehybrid",),
        (),
        _granite_hybrid,
        defaults={"num_local_experts": 8, "position_embedding_type": None},
        limits={"granitemoehybrid": "dense without Mamba"},
        parts={
            "shared_mlp.input_linear": "mlp.gate_up_proj",
            "shared_mlp.output_linear": "mlp.down_proj",
        },
    ),
    Family(
        ("smollm3",),
        ("smollm3",),
        _smollm3,
        _smollm3_metadata,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
        is_permuted=True,
    ),
    Family(  # Hu et al. 2024
        ("minicpm",),
        ("minicpm",),
        _minicpm,
        _minicpm_metadata,
        defaults={"tie_word_embeddings": True},
        is_permuted=True,
    ),
    # Phi-3, 3.5 and 4-mini (Abdin et al. 2024): fused matrices, part of a head rotated, LongRoPE.
    Family(("phi3",), ("phi3",), _phi, _phi_metadata, gguf_parts={"ffn_up": "mlp.gate_up_proj"}),
    # As GGUF, OLMo 3 is an olmo2 with a window.
    Family(("olmo2",), ("olmo2",), _olmo, _olmo_metadata, **_POST_NORMS),
    Family(("olmo3",), (), _olmo, _olmo_metadata, {"rope_theta": 5e5}, **_POST_NORMS),
    Family(("exaone4",), ("exaone4",), _exaone4, _exaone4, **_POST_NORMS),
    Family(
        ("hunyuan_v1_dense",),
        ("hunyuan-dense",),
        _hunyuan,
        _hunyuan,
        parts={
            "self_attn.query_layernorm": "self_attn.q_norm",
            "self_attn.key_layernorm": "self_attn.k_norm",
        },
    ),
    Family(
        ("ministral3", "mistral3"),
        ("mistral3",),
        _ministral,
        _ministral_metadata,
        limits={"mistral3": "text"},
        is_permuted=True,
        prefixes=TEXT_PREFIXES,
        ignored=PICTURES,
    ),
    Family(
        ("qwen3_moe",),
        ("qwen3moe",),
        _qwen_moe,
        _qwen_moe_metadata,
        defaults={"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False},
        parts={"mlp.gate": "mlp.router"},
        gguf_parts=GGUF_EXPERTS,
        computes=(EXPERTS,),
    ),
)
