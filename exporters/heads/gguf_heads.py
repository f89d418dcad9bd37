"""EAGLE-3, DFlash and DSpark heads in GGUF files, as llama.cpp's converter writes them: what they
state by the keys of config.json, and their tensors by the names that such heads have elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead, EagleHead
from edge_spec.errors import ModelFileError
from edge_spec.exporters.gguf_reader import DFLASH, EAGLE3, GgufFile, Metadata
from edge_spec.exporters.heads.dflash import dflash_head
from edge_spec.exporters.heads.eagle import eagle_head
from edge_spec.exporters.heads.head_files import GGUF_SIZES, VOCABULARY, HeadFiles, stated_in_gguf
from edge_spec.exporters.stored_tensor import StoredTensor

# Of config.json, by the keys of GGUF after the architecture's name, with their types.
_OPTIONAL: Mapping[str, tuple[str, type]] = {
    "head_dim": ("attention.key_length", int),
    "rope_theta": ("rope.freq_base", float),
    "vocab_size": ("vocab_size", int),
    "block_size": ("block_size", int),
    "sample_from_anchor": ("sample_from_anchor", bool),
    "norm_before_residual": ("norm_before_residual", bool),
    "norm_before_fc": ("norm_before_fc", bool),
    "is_causal": ("attention.causal", bool),
    "sliding_window": ("attention.sliding_window", int),
    "hidden_act": ("hidden_activation", str),
    "selector_rank": ("selector_rank", int),
    "attention_value_scale": ("attention.value_scale", float),
    "output_multiplier": ("logit_scale", float),
    "input_embedding_scale": ("embedding_scale", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
}
_INPUTS, _MASK = "target_layers", "tokenizer.ggml.mask_token_id"
_NAMES = {
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_AFTER_FC = {EAGLE3: "input_norm", DFLASH: "hidden_norm"}  # what enc.output_norm is there
_NAME = re.compile(r"(?:blk\.(\d{1,3})\.)?([\w.]+?)(\.weight|\.bias)?")


def trained_gguf_head(path: Path, target: ModelConfig, has_weights: bool) -> EagleHead | DFlashHead:
    """Raises as `open_head` does."""
    file = GgufFile(path)
    metadata = Metadata(file.metadata, path)
    architecture = metadata.require("general.architecture", str)
    values = _stated(metadata, architecture)
    tensors = {_published(name, architecture): each for name, each in file.tensors.items()}
    _make_as_published(tensors, values)
    files = HeadFiles(path, values, tensors, target, has_weights)
    return eagle_head(files) if architecture == EAGLE3 else dflash_head(files)


def _stated(metadata: Metadata, architecture: str) -> dict[str, Any]:
    remedy = "Use the head as its authors publish it, in safetensors."
    values = stated_in_gguf(metadata, GGUF_SIZES, _OPTIONAL, "heads in GGUF files", remedy)
    stored = np.asarray(metadata.values.get(f"{architecture}.{_INPUTS}", ()))
    if stored.dtype.kind not in "iu" or stored.ndim != 1:
        raise ModelFileError(f"{metadata.path} names no layers", remedy="Convert the head again.")
    inputs = stored.tolist()
    if architecture == EAGLE3:
        # Rows of q and k stand as neighbouring pairs, as those of all models like Llama.
        return values | {"eagle_aux_hidden_state_layer_ids": inputs, "rope_is_neox_style": False}
    # A block scores next tokens by default where it has transitions, as llama.cpp reads it.
    stated = {
        "mask_token_id": metadata.get(_MASK, int),
        "target_layer_ids": [each - 1 for each in inputs],
    }
    return values | {"dflash_config": stated}


def _published(name: str, architecture: str) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, own, ending = match.groups(default="")
    known = _AFTER_FC[architecture] if own == "enc.output_norm" else _NAMES.get(own, own)
    return f"layers.{layer}.{known}{ending}" if layer else known + ending


def _make_as_published(tensors: dict[str, StoredTensor], values: dict[str, Any]) -> None:
    """Changes what GGUF has in another form: ids of tokens in the place of offsets, and vectors in
    the place of matrices of one row."""
    ids = tensors.get(VOCABULARY[0])
    if ids is not None and len(ids.shape) == 1 and ids.data.nbytes == 8 * ids.shape[0]:
        offsets = np.frombuffer(ids.data.tobytes(), np.int64) - np.arange(ids.shape[0])
        tensors[VOCABULARY[0]] = replace(ids, data=offsets.view(np.uint8))
        values["draft_vocab_size"] = ids.shape[0]
    for name, each in tensors.items():
        if name == "confidence_head.proj.weight" and len(each.shape) == 1:
            tensors[name] = replace(each, shape=(1, *each.shape), data=each.data[None])
