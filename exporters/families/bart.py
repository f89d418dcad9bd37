"""BART (Lewis et al. 2020) and Marian's translators (Junczys-Dowmunt et al. 2018).

Each sublayer is followed by a LayerNorm of the stream, which is what the next one reads: as we name
them, norms belong to the sublayer that reads them, and the last one is the model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.encoder import Encoder
from edge_spec.core.layer_kind import LayerKind
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.stored_tensor import StoredTensor

OFFSET = 2  # rows of BART's tables that no position has
# What Marian's start token has less than its score: it is never written.
_NEVER = np.float32(100.0)
HALVES = MappingProxyType({"encoder": "encoder", "decoder": "model"})
ATTENTION = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"encoder_attn.{part}_proj": f"cross_attn.{part}_proj" for part in "qkv"},
    "self_attn.out_proj": "self_attn.o_proj",
    "encoder_attn.out_proj": "cross_attn.o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "encoder": {**ATTENTION, "self_attn_layer_norm": "post_attention_layernorm"},
        "decoder": {
            **ATTENTION,
            "self_attn_layer_norm": "cross_attn.input_norm",
            "encoder_attn_layer_norm": "post_attention_layernorm",
        },
    }
)
_LAYER = re.compile(r"(?:model\.)?(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OTHER = re.compile(
    r"(?:model\.)?(encoder|decoder)\.(embed_positions|layernorm_embedding)\.(weight|bias)"
)
DEFAULTS = MappingProxyType(
    {
        "activation_function": "gelu",
        "scale_embedding": False,
        "rms_norm_eps": 1e-5,  # of LayerNorm, which config.json does not state
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
)
KEYS = MappingProxyType(
    {
        "hidden_size": "d_model",
        "num_hidden_layers": "decoder_layers",
        "intermediate_size": "decoder_ffn_dim",
        "num_attention_heads": "decoder_attention_heads",
        "hidden_act": "activation_function",
    }
)
_BOTH = ("layers", "attention_heads", "ffn_dim")  # which each half states for itself


def _of_config(is_marian: bool, stated: StatedConfig) -> Fields:
    values = stated.values
    if values.get("normalize_before") or values.get("add_final_layer_norm"):
        raise stated.refuse("norms before its sublayers")
    stream = {"embedding_norm": not is_marian, "norm_places": "stream"}
    return {**fields_of_config(stated), **stream, "logit_bias": True}


def fields_of_config(stated: StatedConfig) -> Fields:
    """Returns the fields that these models share with others that came of them."""
    values = stated.values
    for size in _BOTH[1:]:
        if values[f"encoder_{size}"] != values[f"decoder_{size}"]:
            raise stated.refuse(f"an encoder with other {size} than its decoder")
    if values.get("share_encoder_decoder_embeddings") is False:
        raise stated.refuse("an embedding of its encoder's own")
    start, forced = int(values["decoder_start_token_id"]), values.get("forced_bos_token_id")
    return {
        "num_layers": int(values["decoder_layers"]),
        "embedding_scale": int(values["d_model"]) ** 0.5 if values["scale_embedding"] else 1.0,
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


def _rename(name: str) -> str:
    if name in ("model.shared.weight", "shared.weight"):
        return "model.embed_tokens.weight"
    if name == "final_logits_bias":
        return "lm_head.bias"
    if found := _OTHER.fullmatch(name):
        half, part, suffix = found.groups()
        ours = "embed_positions" if part == "embed_positions" else "layers.0.input_layernorm"
        return f"{HALVES[half]}.{ours}.{suffix}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    half, number, part, suffix = found.groups()
    if part == "final_layer_norm":
        return f"{HALVES[half]}.layers.{int(number) + 1}.input_layernorm.{suffix}"
    return f"{HALVES[half]}.layers.{number}.{_PARTS[half].get(part, part)}.{suffix}"


def _of_tensors(
    is_marian: bool, config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    assert config.encoder is not None
    found = dict(stored)
    for half, layers in (("model", config.num_layers), ("encoder", config.encoder.num_layers)):
        for suffix in ("weight", "bias"):
            last = found.pop(f"{half}.layers.{layers}.input_layernorm.{suffix}", None)
            if last is not None:
                found[f"{half}.norm.{suffix}"] = last
        table = f"{half}.embed_positions.weight"
        if is_marian:
            found[table] = made(sinusoids(config.context_length, config.hidden_size))
        elif table in found:
            found[table] = found[table].rows(slice(OFFSET, None))
    bias = found.get("lm_head.bias")
    scores = np.zeros(config.vocab_size, np.float32) if bias is None else bias.float32().ravel()
    if is_marian:
        scores = scores.copy()
        scores[config.encoder.start_id] -= _NEVER
    found["lm_head.bias"] = made(scores)
    return found


def sinusoids(num_positions: int, width: int) -> np.ndarray:
    """[positions, width] (Vaswani et al. 2017), all sines before the cosines."""
    frequencies = 10000.0 ** (-2 * np.arange((width + 1) // 2) / width)
    angles = np.arange(num_positions)[:, None] * frequencies
    sines, cosines = np.sin(angles), np.cos(angles[:, : width // 2])
    return np.concatenate([sines, cosines], axis=1).astype(np.float32)


def made(values: np.ndarray) -> StoredTensor:
    return StoredTensor(values.shape, GGMLQuantizationType.F32, values.view(np.uint8))


def _family(model_type: str) -> Family:
    is_marian = model_type == "marian"
    return Family(
        model_types=(model_type,),
        architectures=(),
        of_config=partial(_of_config, is_marian),
        defaults=DEFAULTS,
        keys=KEYS,
        ignored=(
            *(f"model.{half}.embed_tokens." for half in HALVES),
            *((f"model.{half}.embed_positions." for half in HALVES) if is_marian else ()),
            "lm_head.",
        ),
        rename=_rename,
        of_tensors=partial(_of_tensors, is_marian),
    )


BART, MARIAN = map(_family, ("bart", "marian"))
