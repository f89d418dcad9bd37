"""BART (Lewis et al. 2020) and those that came of it: Marian's translators (Junczys-Dowmunt et al.
2018), mBART (Liu et al. 2020), Pegasus (Zhang et al. 2020), M2M-100 (Fan et al. 2021) and NLLB,
which is the same model (NLLB Team 2022).

In BART and Marian each sublayer is followed by a LayerNorm of the stream, which is what the next
one reads: as we name them, norms belong to the sublayer that reads them, and the last one is the
model's. The others have norms before sublayers, and one at the end.

Positions are a table that BART and mBART have learnt, and sines and cosines in the others. mBART's
embeddings are normed, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import Encoder, LayerKind
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.stored_tensor import StoredTensor

_OFFSET = 2  # rows of learnt tables that no position has
# What Marian's start token has less than its score: it is never written.
_NEVER = np.float32(100.0)
_BART, _MARIAN, _MBART, _PEGASUS, _M2M = "bart", "marian", "mbart", "pegasus", "m2m_100"
_NORM_STREAM = (_BART, _MARIAN)
_HALVES = {"encoder": "encoder", "decoder": "model"}
_ATTENTION = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"encoder_attn.{part}_proj": f"cross_attn.{part}_proj" for part in "qkv"},
    "self_attn.out_proj": "self_attn.o_proj",
    "encoder_attn.out_proj": "cross_attn.o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
# Of a layer: where the stream is normed, the norm after a sublayer is the next one's.
_STREAM_PARTS = {
    "encoder": {**_ATTENTION, "self_attn_layer_norm": "post_attention_layernorm"},
    "decoder": {
        **_ATTENTION,
        "self_attn_layer_norm": "cross_attn.input_norm",
        "encoder_attn_layer_norm": "post_attention_layernorm",
    },
}
_PARTS = {
    **_ATTENTION,
    "self_attn_layer_norm": "input_layernorm",
    "encoder_attn_layer_norm": "cross_attn.input_norm",
    "final_layer_norm": "post_attention_layernorm",
}
_OTHERS = {
    "embed_positions": "embed_positions",
    "layernorm_embedding": "input_norm",
    "layer_norm": "norm",
}
_PART = re.compile(r"(?:model\.)?(encoder|decoder)\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
_DEFAULTS = {
    "activation_function": "gelu",
    "scale_embedding": False,
    "rms_norm_eps": 1e-5,  # of LayerNorm, which config.json does not state
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
_STREAM_OTHERS = {
    "embed_positions": "embed_positions",
    "layernorm_embedding": "layers.0.input_layernorm",
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


def _rename(model_type: str, name: str) -> str:
    if name in ("model.shared.weight", "shared.weight"):
        return "model.embed_tokens.weight"
    if name == "final_logits_bias":
        return "lm_head.bias"
    found = _PART.fullmatch(name)
    if found is None:
        return name
    half, number, part, suffix = found.groups()
    norms_stream = model_type in _NORM_STREAM
    if number is None:
        own = (_STREAM_OTHERS if norms_stream else _OTHERS).get(part)
    elif norms_stream and part == "final_layer_norm":
        own = f"layers.{int(number) + 1}.input_layernorm"
    else:
        own = (_STREAM_PARTS[half] if norms_stream else _PARTS).get(part)
        own = own and f"layers.{number}.{own}"
    return f"{_HALVES[half]}.{own}.{suffix}" if own else name


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
            found[table] = _made(_sinusoids_from_two(length, width))
        elif model_type == _MARIAN or (model_type == _PEGASUS and table not in found):
            found[table] = _made(_sinusoids(length, width))
        elif model_type != _PEGASUS and table in found:
            found[table] = found[table].rows(slice(_OFFSET, None))
    if config.logit_bias:
        bias = found.get("lm_head.bias")
        scores = np.zeros(config.vocab_size, np.float32) if bias is None else bias.float32().ravel()
        if model_type == _MARIAN:
            scores = scores.copy()
            scores[config.encoder.start_id] -= _NEVER
        found["lm_head.bias"] = _made(scores)
    return found


def _sinusoids_from_two(num_positions: int, width: int) -> np.ndarray:
    """[positions, width] as fairseq has them, in float32: the last frequency is a ten thousandth
    of the first, and positions are counted from _OFFSET on."""
    half = width // 2
    steps = np.float32(np.log(10000) / (half - 1))
    frequencies = np.exp(-np.arange(half, dtype=np.float32) * steps)
    places = np.arange(_OFFSET, num_positions + _OFFSET, dtype=np.float32)
    angles = places[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2)))


def _sinusoids(num_positions: int, width: int) -> np.ndarray:
    """[positions, width] (Vaswani et al. 2017), all sines before the cosines."""
    frequencies = 10000.0 ** (-2 * np.arange((width + 1) // 2) / width)
    angles = np.arange(num_positions)[:, None] * frequencies
    sines, cosines = np.sin(angles), np.cos(angles[:, : width // 2])
    return np.concatenate([sines, cosines], axis=1).astype(np.float32)


def _made(values: np.ndarray) -> StoredTensor:
    return StoredTensor(values.shape, GGMLQuantizationType.F32, values.view(np.uint8))


def _family(model_type: str, **defaults: object) -> Family:
    ignored = [f"model.{half}.embed_tokens." for half in _HALVES]
    if model_type in (_MARIAN, _M2M):
        ignored += [f"model.{half}.embed_positions." for half in _HALVES]
    return Family(
        model_types=(model_type,),
        architectures=(),
        of_config=partial(_of_config, model_type),
        defaults=_DEFAULTS | defaults,
        keys=_KEYS,
        ignored=(*ignored, "lm_head."),
        rename=partial(_rename, model_type),
        of_tensors=partial(_of_tensors, model_type),
    )


FAMILIES = (
    _family(_BART),
    _family(_MARIAN),
    _family(_MBART),
    _family(_PEGASUS, eos_token_id=1, decoder_start_token_id=0),
    _family(_M2M, activation_function="relu", scale_embedding=True, pad_token_id=1),
)
