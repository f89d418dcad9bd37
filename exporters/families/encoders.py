"""T5 (Raffel et al. 2020), T5 1.1 and Flan-T5; BART (Lewis et al. 2020), Marian (Junczys-Dowmunt et
al. 2018), mBART (Liu et al. 2020), Pegasus (Zhang et al. 2020), M2M-100 (Fan et al. 2021) and NLLB
(NLLB Team 2022), the same model.

T5 has an ungated MLP and a tied head; 1.1 and Flan have gated MLPs and their own head. BART and
Marian normalize the stream after each sublayer, the others before. Our names assign a norm to the
sublayer that reads its output, and the last one to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Encoder, LayerKind, RelativePositions
from edge_spec.exporters.families.family import Family, Fields, Rules
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.stored_tensor import StoredTensor

_MLPS: Mapping[str, Fields] = {
    "relu": {"activation": "relu", "gated_mlp": False},
    "gated-gelu": {"activation": "gelu_tanh"},
    "gated-silu": {"activation": "silu"},
}
_T5_RULES: Rules = (
    (r"^shared\.", "model.embed_tokens."),
    (r"final_layer_norm", "norm"),
    (r"block\.0\.layer\.0\.SelfAttention\.relative_attention_bias", "relative_bias"),
    (r"block\.(\d+)\.", r"layers.\1."),
    (r"layer\.0\.layer_norm", "input_layernorm"),
    (r"layer\.0\.SelfAttention\.(\w)\.", r"self_attn.\1_proj."),
    (r"layer\.1\.EncDecAttention\.(\w)\.", r"cross_attn.\1_proj."),
    (r"^decoder(.+)layer\.1\.layer_norm", r"decoder\1cross_attn.input_norm"),
    (r"layer\.\d\.layer_norm", "post_attention_layernorm"),
    (r"layer\.\d\.DenseReluDense\.wi_0\.", "mlp.gate_proj."),
    (r"layer\.\d\.DenseReluDense\.wi(_1)?\.", "mlp.up_proj."),
    (r"layer\.\d\.DenseReluDense\.wo\.", "mlp.down_proj."),
    (r"^decoder\.", "model."),
)


def _t5(stated: StatedConfig) -> Fields:
    values = stated.values
    mlp = str(values.get("feed_forward_proj", "relu"))
    if mlp not in _MLPS:
        raise stated.refuse(f"the activation {mlp[:40]!r}")
    # Only a model with a tied head scales the hidden states; transformers 5 ties all.
    scales = values.get("scale_decoder_outputs", values["tie_word_embeddings"])
    num_layers = int(values["num_hidden_layers"])
    return {
        **_MLPS[mlp],
        "num_layers": int(values.get("num_decoder_layers") or num_layers),
        "context_length": 2 * stated.context_length,  # half for the source, half for the answer
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


T5 = Family(
    model_types=("t5",),
    architectures=(),
    of_config=_t5,
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
    # Copies of the embedding, and a table that T5 never reads.
    ignored=(
        "encoder.embed_tokens.",
        "decoder.embed_tokens.",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",
    ),
    rules=_T5_RULES,
)


_OFFSET = 2  # unused first rows of learnt position tables
# Keeps Marian's start token from being drawn.
_NEVER = np.float32(100.0)
_BART, _MARIAN, _MBART, _PEGASUS, _M2M = "bart", "marian", "mbart", "pegasus", "m2m_100"
_NORM_STREAM = (_BART, _MARIAN)
_COMMON_RULES: Rules = (
    (r"^model\.", ""),
    (r"^final_logits_bias$", "lm_head.bias"),
    (r"coder\.layer_norm\.", "coder.norm."),
    (r"out_proj", "o_proj"),
    (r"fc1", "mlp.up_proj"),
    (r"fc2", "mlp.down_proj"),
    (r"encoder_attn\.", "cross_attn."),
    (r"^decoder\.", "model."),
    (r"^shared\.", "model.embed_tokens."),
)
_RULES: Rules = (
    (r"layernorm_embedding", "input_norm"),
    (r"self_attn_layer_norm", "input_layernorm"),
    (r"encoder_attn_layer_norm", "cross_attn.input_norm"),
    (r"final_layer_norm", "post_attention_layernorm"),
    *_COMMON_RULES,
)
# A norm after a sublayer of the stream belongs to the next one.
_STREAM_RULES: Rules = (
    (r"layernorm_embedding", "layers.0.input_layernorm"),
    (r"encoder(\.layers.+)self_attn_layer_norm", r"encoder\1post_attention_layernorm"),
    (r"self_attn_layer_norm", "cross_attn.input_norm"),
    (r"encoder_attn_layer_norm", "post_attention_layernorm"),
    (
        r"(\d+)\.final_layer_norm",
        lambda found: f"{int(found[1]) + 1}.input_layernorm",
    ),
    *_COMMON_RULES,
)
_DEFAULTS = {
    "activation_function": "gelu",
    "scale_embedding": False,
    "rms_norm_eps": 1e-5,  # of LayerNorm; config.json does not have it
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "intermediate_size": "decoder_ffn_dim",
    "num_attention_heads": "decoder_attention_heads",
    "hidden_act": "activation_function",
}


def _of_config(model_type: str, stated: StatedConfig) -> Fields:
    values = stated.values
    own: Fields
    if model_type in _NORM_STREAM:
        if values.get("normalize_before") or values.get("add_final_layer_norm"):
            raise stated.refuse("norms before its sublayers")
        own = {"embedding_norm": model_type == _BART, "norm_places": "stream"}
    else:
        if values.get("tie_word_embeddings") is False:
            raise stated.refuse("a head of its own")
        if model_type == _M2M and values["pad_token_id"] != _OFFSET - 1:
            raise stated.refuse(f"positions that begin after the token {values['pad_token_id']}")
        own = {"input_norm": model_type == _MBART}
    for size in ("attention_heads", "ffn_dim"):
        if values[f"encoder_{size}"] != values[f"decoder_{size}"]:
            raise stated.refuse(f"an encoder with other {size} than its decoder")
    if values.get("share_encoder_decoder_embeddings") is False:
        raise stated.refuse("an embedding of its encoder's own")
    start, forced = int(values["decoder_start_token_id"]), values.get("forced_bos_token_id")
    return {
        **own,
        "num_layers": int(values["decoder_layers"]),
        "embedding_scale": int(values["d_model"]) ** 0.5 if values["scale_embedding"] else 1.0,
        "logit_bias": model_type != _M2M,
        "layer_norm": True,
        "gated_mlp": False,
        "mlp_bias": True,
        "position_table": True,
        "tied_embeddings": True,
        "layer_kinds": (LayerKind(None),),
        "encoder": Encoder(
            int(values["encoder_layers"]),
            start,
            ends_source=start == values["eos_token_id"],
            forced_id=None if forced is None else int(forced),
        ),
    }


def _of_tensors(
    model_type: str, config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    assert config.encoder is not None
    found = dict(stored)
    length, width = config.context_length, config.hidden_size
    for half, layers in (("model", config.num_layers), ("encoder", config.encoder.num_layers)):
        for suffix in ("weight", "bias") if model_type in _NORM_STREAM else ():
            last = found.pop(f"{half}.layers.{layers}.input_layernorm.{suffix}", None)
            if last is not None:
                found[f"{half}.norm.{suffix}"] = last
        table = f"{half}.embed_positions.weight"
        if model_type == _M2M:
            found[table] = StoredTensor.of(_sinusoids_from_two(length, width))
        elif model_type == _MARIAN or (model_type == _PEGASUS and table not in found):
            found[table] = StoredTensor.of(_sinusoids(length, width))
        elif model_type != _PEGASUS and table in found:
            found[table] = found[table].rows(slice(_OFFSET, None))
    if config.logit_bias:
        bias = found.get("lm_head.bias")
        scores = np.zeros(config.vocab_size, np.float32) if bias is None else bias.float32().ravel()
        if model_type == _MARIAN:
            scores = scores.copy()
            scores[config.encoder.start_id] -= _NEVER
        found["lm_head.bias"] = StoredTensor.of(scores)
    return found


def _sinusoids_from_two(num_positions: int, width: int) -> np.ndarray:
    """Return fairseq's table [positions, width] float32, counted from _OFFSET. The last frequency
    is 1/10,000 of the first."""
    half = width // 2
    steps = np.float32(np.log(10000) / (half - 1))
    frequencies = np.exp(-np.arange(half, dtype=np.float32) * steps)
    places = np.arange(_OFFSET, num_positions + _OFFSET, dtype=np.float32)
    angles = places[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2)))


def _sinusoids(num_positions: int, width: int) -> np.ndarray:
    """Return [positions, width] (Vaswani et al. 2017), all sines before the cosines."""
    frequencies = 10000.0 ** (-2 * np.arange((width + 1) // 2) / width)
    angles = np.arange(num_positions)[:, None] * frequencies
    sines, cosines = np.sin(angles), np.cos(angles[:, : width // 2])
    return np.concatenate([sines, cosines], axis=1).astype(np.float32)


def _family(model_type: str, **defaults: object) -> Family:
    made = ["embed_tokens", *(["embed_positions"] if model_type in (_MARIAN, _M2M) else [])]
    ignored = [f"model.{half}.{table}." for half in ("encoder", "decoder") for table in made]
    return Family(
        model_types=(model_type,),
        architectures=(),
        of_config=partial(_of_config, model_type),
        defaults=_DEFAULTS | defaults,
        keys=_KEYS,
        ignored=(*ignored, "lm_head."),
        rules=_STREAM_RULES if model_type in _NORM_STREAM else _RULES,
        of_tensors=partial(_of_tensors, model_type),
    )


FAMILIES = (
    _family(_BART),
    _family(_MARIAN),
    _family(_MBART),
    _family(_PEGASUS, eos_token_id=1, decoder_start_token_id=0),
    _family(_M2M, activation_function="relu", scale_embedding=True, pad_token_id=1),
)
