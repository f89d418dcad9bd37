"""mBART (Liu et al. 2020), Pegasus (Zhang et al. 2020), M2M-100 (Fan et al. 2021) and NLLB, which
is the same model (NLLB Team 2022): BART's layers with norms before sublayers, and one at the end.

Positions are a table that mBART has learnt, and sines and cosines in the others. mBART's
embeddings are normed, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.families.bart import (
    ATTENTION,
    DEFAULTS,
    HALVES,
    KEYS,
    OFFSET,
    fields_of_config,
    made,
    sinusoids,
)
from edge_spec.exporters.families.family import Family, Fields
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.stored_tensor import StoredTensor

_PARTS = MappingProxyType(
    {
        **ATTENTION,
        "self_attn_layer_norm": "input_layernorm",
        "encoder_attn_layer_norm": "cross_attn.input_norm",
        "final_layer_norm": "post_attention_layernorm",
    }
)
_OTHERS = MappingProxyType(
    {
        "embed_positions": "embed_positions",
        "layernorm_embedding": "input_norm",
        "layer_norm": "norm",
    }
)
_PART = re.compile(r"(?:model\.)?(encoder|decoder)\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
_MBART, _PEGASUS, _M2M = "mbart", "pegasus", "m2m_100"


def _of_config(model_type: str, stated: StatedConfig) -> Fields:
    values = stated.values
    if values.get("tie_word_embeddings") is False:
        raise stated.refuse("a head of its own")
    if model_type == _M2M and values["pad_token_id"] != OFFSET - 1:
        raise stated.refuse(f"positions that begin after the token {values['pad_token_id']}")
    return {
        **fields_of_config(stated),
        "input_norm": model_type == _MBART,
        "logit_bias": model_type != _M2M,
    }


def _rename(name: str) -> str:
    if name in ("model.shared.weight", "shared.weight"):
        return "model.embed_tokens.weight"
    if name == "final_logits_bias":
        return "lm_head.bias"
    found = _PART.fullmatch(name)
    if found is None:
        return name
    half, number, part, suffix = found.groups()
    if number is not None and part in _PARTS:
        return f"{HALVES[half]}.layers.{number}.{_PARTS[part]}.{suffix}"
    if number is None and part in _OTHERS:
        return f"{HALVES[half]}.{_OTHERS[part]}.{suffix}"
    return name


def _of_tensors(
    model_type: str, config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    found = dict(stored)
    for half in HALVES.values():
        table = f"{half}.embed_positions.weight"
        if model_type == _M2M:
            found[table] = made(_sinusoids_from_two(config.context_length, config.hidden_size))
        elif model_type == _PEGASUS and table not in found:
            found[table] = made(sinusoids(config.context_length, config.hidden_size))
        elif model_type == _MBART and table in found:
            found[table] = found[table].rows(slice(OFFSET, None))
    if config.logit_bias:
        bias = found.get("lm_head.bias")
        scores = np.zeros(config.vocab_size, np.float32) if bias is None else bias.float32()
        found["lm_head.bias"] = made(scores.ravel())
    return found


def _sinusoids_from_two(num_positions: int, width: int) -> np.ndarray:
    """[positions, width] as fairseq has them, in float32: the last frequency is a ten thousandth
    of the first, and positions are counted from OFFSET on."""
    half = width // 2
    steps = np.float32(np.log(10000) / (half - 1))
    frequencies = np.exp(-np.arange(half, dtype=np.float32) * steps)
    places = np.arange(OFFSET, num_positions + OFFSET, dtype=np.float32)
    angles = places[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2)))


def _family(model_type: str, **defaults: object) -> Family:
    ignored = [f"model.{half}.embed_tokens." for half in HALVES]
    if model_type == _M2M:
        ignored += [f"model.{half}.embed_positions." for half in HALVES]
    return Family(
        model_types=(model_type,),
        architectures=(),
        of_config=partial(_of_config, model_type),
        defaults={**DEFAULTS, **defaults},
        keys=KEYS,
        ignored=(*ignored, "lm_head."),
        rename=_rename,
        of_tensors=partial(_of_tensors, model_type),
    )


MBART = _family(_MBART)
PEGASUS = _family(_PEGASUS, eos_token_id=1, decoder_start_token_id=0)
M2M = _family(_M2M, activation_function="relu", scale_embedding=True, pad_token_id=1)
