"""Describe a model family: where its files define the decoder, and how they name its tensors.

GGUF metadata is first translated to config.json's keys. Tensors get Llama's names and layout at
Hugging Face; self_attn.post_norm and mlp.post_norm are norms of a sublayer's output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.families.stated import GgufKeys, StatedConfig
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

Fields = Mapping[str, Any]  # ModelConfig fields
Parts = Mapping[str, str]
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]  # for re.sub, in order
# Convert tensors to our shapes, such as stacked experts to one tensor per expert.
ShapedTensors = Callable[[ModelConfig, Mapping[str, StoredTensor]], dict[str, StoredTensor]]
# Names of the text model's tensors in models with vision, and prefixes of the other tensors.
TEXT_RULES: Rules = (
    (r"^(language_model\.model|model\.language_model)\.", "model."),
    (r"^language_model\.", ""),  # the head
)
_PICTURES = ("vision_tower.", "multi_modal_projector.")
PICTURES = (*_PICTURES, *(f"model.{part}" for part in _PICTURES))


@dataclass(frozen=True)
class Family:
    """How the files of one family differ from Llama's.

    of_config: fields that the family defines in its own way. of_gguf: its further values in GGUF.
    """

    model_types: tuple[str, ...]  # in config.json
    architectures: tuple[str, ...]  # general.architecture in GGUF
    of_config: Callable[[StatedConfig], Fields] = lambda stated: {}
    of_gguf: Callable[[GgufKeys, Fields], Fields] = lambda keys, values: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for keys missing in config.json
    # For keys missing in GGUF, if other than `defaults`.
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Parts = field(default_factory=dict)  # usual config.json key -> this family's
    rules: Rules = ()  # safetensors names -> ours
    # GGUF names -> ours: parts of a layer (with the suffix where ours has none), and whole names.
    gguf_parts: Parts = field(default_factory=dict)
    is_permuted: bool = False  # GGUF stores rows of q and k as interleaved pairs
    ignored: tuple[str, ...] = ()  # prefixes of tensors that text does not need
    computes: tuple[str, ...] = ()  # features beyond the usual, as stated.py names them
    of_tensors: ShapedTensors | None = None  # for safetensors with other shapes


MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = "model.layers."
# Missing in a layer that reads another layer's keys and values.
_OF_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")
_ALL_EXPERTS = ".mlp.experts."
_LIBRARY_ONLY = Family((), ())  # knows only the common names


def hf_name(name: str, family: Family = _LIBRARY_ONLY) -> str:
    """Return our name of a GGUF tensor, or `name` itself if there is none."""
    known = family.gguf_parts.get(name, MODEL_NAMES.get(name))
    if known is not None:
        return known
    block, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    if block == "blk" and rest in family.gguf_parts:
        return f"{LAYER}{number}.{family.gguf_parts[rest]}"
    own, _, suffix = rest.rpartition(".")
    part = family.gguf_parts.get(own, LAYER_NAMES.get(own))
    return name if block != "blk" or part is None else f"{LAYER}{number}.{part}.{suffix}"


def named_as_ours(family: Family, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename safetensors tensors to our names; drop those that text does not need."""
    return {
        _our_name(name, family): tensor
        for name, tensor in tensors.items()
        if not name.startswith(family.ignored or ("\0",))
    }


def _our_name(name: str, family: Family) -> str:
    for pattern, ours in family.rules:
        name = re.sub(pattern, ours, name)
    return name


def read_gguf(family: Family, keys: GgufKeys) -> StatedConfig:
    """Return GGUF metadata as a config.json. Raises ModelFileError, UnsupportedModelError."""
    embeddings = keys.tensors["model.embed_tokens.weight"]
    values = {
        **family.defaults,
        **family.gguf_defaults,
        **keys.as_config(family.is_permuted),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in keys.tensors,
    }
    return StatedConfig({**values, **family.of_gguf(keys, values)}, keys.path)


def model_config(
    family: Family, stated: StatedConfig, tensors: Mapping[str, StoredTensor]
) -> ModelConfig:
    """Raises ModelFileError for missing or invalid values. tensors: by our names."""
    values = stated.values
    try:
        rope = stated.rope()
        fields: dict[str, Any] = {
            "architecture": str(values["model_type"]),
            "num_layers": int(values["num_hidden_layers"]),
            "hidden_size": int(values["hidden_size"]),
            "intermediate_size": int(values["intermediate_size"]),
            "num_heads": stated.num_heads,
            "num_kv_heads": int(values.get("num_key_value_heads") or stated.num_heads),
            "head_dim": stated.head_dim,
            "vocab_size": int(values["vocab_size"]),
            "context_length": stated.context_length,
            "norm_epsilon": float(values["rms_norm_eps"]),
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
            "activation": stated.activation,
            "rotary_dim": stated.rotary_dim,
            **_biases_and_norms(tensors),
        }
        config = ModelConfig(**{**fields, **family.of_config(stated)})
        has_head = config.encoder is None or "lm_head.weight" in tensors
        return config if has_head else replace(config, tied_embeddings=True)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(f"{stated.path} lacks a valid value: {error}") from None


def _biases_and_norms(tensors: Mapping[str, StoredTensor]) -> dict[str, bool]:
    return {
        "qk_norm": f"{LAYER}0.self_attn.q_norm.weight" in tensors,
        "qkv_bias": any(f"{LAYER}0.self_attn.{part}_proj.bias" in tensors for part in ("q", "qkv")),
        "output_bias": f"{LAYER}0.self_attn.o_proj.bias" in tensors,
    }


def arranged(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Split fused tensors: all experts ([experts, ...]), and matrices stacked by rows.

    Drops keys and values of layers that read another layer's; some files have them anyway.
    """
    unread = tuple(
        f"{LAYER}{layer}.self_attn.{part}."
        for layer in range(len(config.kv_sources))
        for part in _OF_KEYS_AND_VALUES
        if config.kv_source(layer) != layer
    )
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.partition(_ALL_EXPERTS)
        if name.startswith(unread or ("\0",)):
            continue
        if part.count(".") == 1 and config.experts is not None:
            for expert, own in enumerate(experts_of(name, tensor, config.num_experts)):
                found |= _apart(config, f"{prefix}{_ALL_EXPERTS}{expert}.{part}", own)
        else:
            found |= _apart(config, name, tensor)
    return found


def experts_of(name: str, tensor: StoredTensor, count: int) -> list[StoredTensor]:
    """Split a tensor of all experts, [experts, ...]. Raises ModelFileError."""
    if tensor.shape[0] != count or len(tensor.shape) < 2:
        raise damaged(f"tensor {name} has the shape {list(tensor.shape)}, expected {count} experts")
    return [replace(tensor, shape=tensor.shape[1:], data=data) for data in tensor.data]


def _apart(config: ModelConfig, name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
    stem, _, suffix = name.rpartition(".")
    sublayer, _, fused = stem.rpartition(".")
    inner, kv_size = config.intermediate_size, config.kv_size
    rows_of_parts = {
        "qkv_proj": {"q_proj": config.query_size, "k_proj": kv_size, "v_proj": kv_size},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }.get(fused)
    if rows_of_parts is None:
        return {name: tensor}
    found: dict[str, StoredTensor] = {}
    start = 0
    for part, rows in rows_of_parts.items():
        found[f"{sublayer}.{part}.{suffix}"] = tensor.rows(slice(start, start + rows))
        start += rows
    if start != tensor.shape[0]:
        raise damaged(f"tensor {name} has {tensor.shape[0]} rows, expected {start}")
    return found


def turned(name: str, tensor: StoredTensor, head_dim: int, from_gguf: bool) -> StoredTensor:
    """Reorder rows of queries and keys: from interleaved pairs in some GGUF files to two halves a
    head (`from_gguf`), or back."""
    rows = tensor.shape[0]
    is_damaged = head_dim < 2 or rows % head_dim or head_dim % 2  # its shape is refused later
    if is_damaged or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    stored = (head_dim // 2, 2) if from_gguf else (2, head_dim // 2)
    return tensor.in_order(np.arange(rows).reshape(-1, *stored).swapaxes(1, 2).ravel())


def raised(tensor: StoredTensor, offset: float) -> StoredTensor:
    """Return the tensor plus `offset`. Reads it now: a norm is short."""
    return StoredTensor.of(tensor.float32() + np.float32(offset))
