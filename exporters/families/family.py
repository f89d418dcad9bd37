"""Describes families: where their files state what a decoder is, and how they name its tensors.

A family is read from config.json; what a GGUF file states is put in those words first. Its tensors
get our names, and our layout: that of Llama at Hugging Face.

Beside Llama's there are the norms of what a sublayer adds, self_attn.post_norm and mlp.post_norm.
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

Fields = Mapping[str, Any]  # of a ModelConfig
Parts = Mapping[str, str]
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]  # of re.sub, in turn
# From tensors by our names to the same in our shapes, such as of all experts to those of each.
ShapedTensors = Callable[[ModelConfig, Mapping[str, StoredTensor]], dict[str, StoredTensor]]
# Of the text model's tensors, in models that read pictures too, and what the others begin with.
TEXT_RULES: Rules = (
    (r"^(language_model\.model|model\.language_model)\.", "model."),
    (r"^language_model\.", ""),  # of a head
)
_PICTURES = ("vision_tower.", "multi_modal_projector.")
PICTURES = (*_PICTURES, *(f"model.{part}" for part in _PICTURES))


@dataclass(frozen=True)
class Family:
    """Describes how the files of one family differ from Llama's; every name not mapped here is
    the same.

    of_config: the fields of the description that only this family states, or states in its own way.
    of_gguf: what config.json would state beside the values that all families have.
    """

    model_types: tuple[str, ...]  # of config.json
    architectures: tuple[str, ...]  # of GGUF, as general.architecture
    of_config: Callable[[StatedConfig], Fields] = lambda stated: {}
    of_gguf: Callable[[GgufKeys, Fields], Fields] = lambda keys, values: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that config.json may lack
    # Of keys that GGUF lacks, where those are others.
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Parts = field(default_factory=dict)  # of config.json: what others call them, and this one
    rules: Rules = ()  # from names in safetensors to ours
    # Names in GGUF, and ours: of a layer, with the ending where ours has none, and whole ones.
    gguf_parts: Parts = field(default_factory=dict)
    is_permuted: bool = False  # GGUF has rows of q and k as interleaved pairs
    ignored: tuple[str, ...] = ()  # prefixes of the tensors that text does not need
    computes: tuple[str, ...] = ()  # features that most families lack, as stated.py names them
    of_tensors: ShapedTensors | None = None  # of safetensors that have other shapes


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
# Of an attention: what a layer lacks that attends to the keys and values of another one.
_OF_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")
_ALL_EXPERTS = ".mlp.experts."
_LIBRARY_ONLY = Family((), ())  # of which no more is known than names


def hf_name(name: str, family: Family = _LIBRARY_ONLY) -> str:
    """Returns our name of a tensor of GGUF, or the same where there is none."""
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
    """Returns a safetensors file's tensors by our names, without those that text does not need."""
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
    """Returns what a GGUF file states, as a config.json. Raises ModelFileError,
    UnsupportedModelError."""
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
    """tensors: by our names. Raises ModelFileError for values that are missing or make no model."""
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
    """Returns the fields of a description that the first layer's tensors show."""
    return {
        "qk_norm": f"{LAYER}0.self_attn.q_norm.weight" in tensors,
        "qkv_bias": any(f"{LAYER}0.self_attn.{part}_proj.bias" in tensors for part in ("q", "qkv")),
        "output_bias": f"{LAYER}0.self_attn.o_proj.bias" in tensors,
    }


def arranged(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with those apart that some families store as one: of all experts at once,
    [experts, ...], and rows above rows. Leaves out keys and values of layers that attend to those
    of others, which some files have all the same."""
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
    """Returns what a tensor of all experts, [experts, ...], has of each. Raises ModelFileError."""
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
    """Returns the rows that make queries and keys, which some families' GGUF files have as
    interleaved pairs and safetensors as two halves a head: as halves, or as pairs."""
    rows = tensor.shape[0]
    is_damaged = head_dim < 2 or rows % head_dim or head_dim % 2  # its shape is refused later
    if is_damaged or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    stored = (head_dim // 2, 2) if from_gguf else (2, head_dim // 2)
    return tensor.in_order(np.arange(rows).reshape(-1, *stored).swapaxes(1, 2).ravel())


def raised(tensor: StoredTensor, offset: float) -> StoredTensor:
    """Returns the tensor with this added to each of its values, read now: a norm is short."""
    return StoredTensor.of(tensor.float32() + np.float32(offset))
