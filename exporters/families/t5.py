"""T5 (Raffel et al. 2020), T5 1.1 and Flan-T5: an encoder and a decoder with relative positions.

T5 has one matrix before its activation and reads its scores off the embedding; 1.1 and Flan have
gated MLPs and a head of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from edge_spec.core.model_parts import Encoder, LayerKind, RelativePositions
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig

_MLPS: Mapping[str, Fields] = {
    "relu": {"activation": "relu", "gated_mlp": False},
    "gated-gelu": {"activation": "gelu_tanh"},
    "gated-silu": {"activation": "silu"},
}
_HALVES = {"encoder": "encoder", "decoder": "model"}
_WHOLE = {
    "shared.weight": "model.embed_tokens.weight",
    "encoder.final_layer_norm.weight": "encoder.norm.weight",
    "decoder.final_layer_norm.weight": "model.norm.weight",
}
_BIAS = "layer.0.SelfAttention.relative_attention_bias"
# Of what a layer has after its first norm, without their numbers, which differ in both halves.
_PARTS = {
    **{f"SelfAttention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"EncDecAttention.{part}": f"cross_attn.{part}_proj" for part in "qkvo"},
    "DenseReluDense.wi": "mlp.up_proj",
    "DenseReluDense.wi_0": "mlp.gate_proj",
    "DenseReluDense.wi_1": "mlp.up_proj",
    "DenseReluDense.wo": "mlp.down_proj",
}
_NORMS = {
    "encoder": ("input_layernorm", "post_attention_layernorm"),
    "decoder": ("input_layernorm", "cross_attn.input_norm", "post_attention_layernorm"),
}
_BLOCK = re.compile(r"(encoder|decoder)\.block\.(\d+)\.(layer\.(\d)\.(.+))\.weight")


def _of_config(stated: StatedConfig) -> Fields:
    values = stated.values
    mlp = str(values.get("feed_forward_proj", "relu"))
    if mlp not in _MLPS:
        raise stated.refuse(f"the activation {mlp[:40]!r}")
    # Only a model whose head is its embedding scales what it reads; transformers 5 ties all.
    scales = values.get("scale_decoder_outputs", values["tie_word_embeddings"])
    num_layers = int(values["num_hidden_layers"])
    return {
        **_MLPS[mlp],
        "num_layers": int(values.get("num_decoder_layers") or num_layers),
        "context_length": 2 * stated.context_length,  # of the source, and as much of the answer
        "tied_embeddings": bool(scales),
        "logit_scale": int(values["hidden_size"]) ** -0.5 if scales else 1.0,
        "attention_scale": 1.0,
        "layer_kinds": (LayerKind(None),),
        "relative_positions": RelativePositions(
            int(values["relative_attention_num_buckets"]),
            int(values["relative_attention_max_distance"]),
        ),
        "encoder": Encoder(num_layers, int(values["decoder_start_token_id"])),
    }


def _rename(name: str) -> str:
    found = _BLOCK.fullmatch(name)
    if found is None:
        return _WHOLE.get(name, name)
    half, number, whole, sublayer, part = found.groups()
    if whole == _BIAS and number == "0":
        return f"{_HALVES[half]}.relative_bias.weight"
    norms = _NORMS[half]
    is_norm = part == "layer_norm" and int(sublayer) < len(norms)
    ours = norms[int(sublayer)] if is_norm else _PARTS.get(part)
    return name if ours is None else f"{_HALVES[half]}.layers.{number}.{ours}.weight"


T5 = Family(
    model_types=("t5",),
    architectures=(),
    of_config=_of_config,
    defaults={
        "n_positions": 512,
        "tie_word_embeddings": True,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "decoder_start_token_id": 0,
    },
    keys={
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    # The embedding under further names, and a table that T5 never reads.
    ignored=(
        "encoder.embed_tokens.",
        "decoder.embed_tokens.",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",
    ),
    rename=_rename,
)
