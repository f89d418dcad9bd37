"""Families of decoders that differ from Llama in a few fields and names: `FAMILIES` has a row of
each, and before it stand the functions that read what only some of them state."""

from __future__ import annotations

from typing import Any

from edge_spec.core.model_parts import Experts, LayerKind
from edge_spec.core.rope import Rope
from edge_spec.exporters.families.family import PICTURES, TEXT_RULES, Family, Fields
from edge_spec.exporters.families.stated import (
    EXPERTS,
    FULL,
    GGUF_EXPERTS,
    GGUF_POST_NORMS,
    SLIDING,
    StatedConfig,
    last_of,
    of_types,
)

_PERIOD = 4  # of layers, of which the last sees all, or has no positions


def _llama(stated: StatedConfig) -> Fields:
    """Ends the context with a window, within which sliding attention is full attention."""
    window = stated.values.get("sliding_window")
    if not window or not stated.values.get("use_sliding_window", True):
        return {}
    return {"context_length": min(stated.context_length, int(window))}


def _granite(stated: StatedConfig) -> Fields:
    """Granite's multipliers come from muP (Yang et al. 2022)."""
    return {
        "embedding_scale": stated.number("embedding_multiplier", 1.0),
        "residual_scale": stated.number("residual_multiplier", 1.0),
        "attention_scale": stated.optional("attention_multiplier"),
        "logit_scale": 1 / stated.number("logits_scaling", 1.0),
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
        types = last_of(interval, int(values["num_hidden_layers"]))
        rotates = [each != FULL for each in types]
    kinds = {"rope": LayerKind(stated.rope()), "none": LayerKind(None)}
    return of_types(kinds, ["rope" if each else "none" for each in rotates])


def _minicpm(stated: StatedConfig) -> Fields:
    """GGUF has what follows from these numbers, as Granite's multipliers."""
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
    full = stated.rope(FULL)
    fields = _normed_after(stated, full, stated.rope(SLIDING, scaled=False))
    stretched = {"rope_theta": full.theta, "rope_scaling": full.scaling}
    return {**fields, **stretched, "qk_norm_whole": True}


def _exaone4(stated: StatedConfig) -> Fields:
    """Leaves out positions in all layers that do not slide, where some do."""
    return _normed_after(stated, None, stated.rope())


def _normed_after(stated: StatedConfig, full: Rope | None, local: Rope) -> Fields:
    window = stated.values.get("sliding_window")
    if not window:
        return {"norm_places": "after"}
    kinds = {SLIDING: LayerKind(local, int(window)), FULL: LayerKind(full)}
    return {"norm_places": "after", **of_types(kinds, stated.layer_types(_PERIOD))}


def _hunyuan(stated: StatedConfig) -> Fields:
    return {"qk_norm_after_rope": True}


def _ministral(stated: StatedConfig) -> Fields:
    """Queries are as they are within the original length, which is all that runs."""
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
    # llama.cpp stores q and k of "llama", as which it runs Mistral too, for its interleaved
    # rotation (convert_hf_to_gguf, LlamaModel.permute); the Qwen families keep the order of
    # Hugging Face.
    Family(("llama", "mistral"), ("llama",), _llama, is_permuted=True),
    # MiMo is Qwen 2 and layers of its own.
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
        # Older files state none of them: llama.cpp takes those of the 2B model then.
        gguf_defaults={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
        is_permuted=True,
    ),
    # Phi-3, 3.5 and 4-mini (Abdin et al. 2024): fused matrices, part of a head rotated, LongRoPE.
    Family(("phi3",), ("phi3",), _phi, gguf_parts={"ffn_up": "mlp.gate_up_proj"}),
    # As GGUF, OLMo 3 is an olmo2 with a window.
    Family(("olmo2",), ("olmo2",), _olmo, **_POST_NORMS),
    Family(("olmo3",), (), _olmo, defaults={"rope_theta": 5e5}, **_POST_NORMS),
    Family(("exaone4",), ("exaone4",), _exaone4, **_POST_NORMS),
    Family(
        ("hunyuan_v1_dense",),
        ("hunyuan-dense",),
        _hunyuan,
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
        gguf_defaults={"norm_topk_prob": True},  # llama.cpp normalizes, whatever config.json said
        rules=((r"\.mlp\.gate\.", ".mlp.router."),),
        gguf_parts=GGUF_EXPERTS,
        computes=(EXPERTS,),
    ),
)
