"""EAGLE-3, DFlash and DSpark heads in GGUF files, as llama.cpp's converter writes them: what they
state, by the keys of config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead, EagleHead
from edge_spec.exporters.gguf_reader import EAGLE3, GgufFile, Metadata
from edge_spec.exporters.heads import dflash, eagle
from edge_spec.exporters.heads.head_files import FurtherKeys, HeadFiles, gguf_values
from edge_spec.exporters.stored_tensor import damaged

_KEYS: FurtherKeys = {
    "vocab_size": ("vocab_size", int),
    "block_size": ("block_size", int),
    "sample_from_anchor": ("sample_from_anchor", bool),
    "norm_before_residual": ("norm_before_residual", bool),
    "norm_before_fc": ("norm_before_fc", bool),
    "is_causal": ("attention.causal", bool),
    "hidden_act": ("hidden_activation", str),
    "selector_rank": ("selector_rank", int),
    "attention_value_scale": ("attention.value_scale", float),
    "output_multiplier": ("logit_scale", float),
    "input_embedding_scale": ("embedding_scale", float),
}


def trained_gguf_head(path: Path, target: ModelConfig, has_weights: bool) -> EagleHead | DFlashHead:
    """Raises as `open_head` does."""
    file = GgufFile(path)
    metadata, tensors = Metadata(file.metadata, path), dict(file.tensors)
    architecture = metadata.require("general.architecture", str)
    values = gguf_values(file, target, _KEYS)
    ids = tensors.get("d2t")  # ids of tokens here, in the place of offsets
    if ids is not None and len(ids.shape) == 1 and ids.data.nbytes == 8 * ids.shape[0]:
        offsets = np.frombuffer(ids.data.tobytes(), np.int64) - np.arange(ids.shape[0])
        tensors["d2t"] = replace(ids, data=offsets.view(np.uint8))
        values["draft_vocab_size"] = ids.shape[0]
    values |= _layers_and_mask(metadata, architecture)
    files = HeadFiles(path, values, tensors, target, has_weights)
    if architecture == EAGLE3:
        return eagle.eagle_head(files, eagle.GGUF_NAMES)
    return dflash.dflash_head(files, dflash.GGUF_NAMES)


def _layers_and_mask(metadata: Metadata, architecture: str) -> dict[str, Any]:
    stored = np.asarray(metadata.values.get(f"{architecture}.target_layers", ()))
    if stored.dtype.kind not in "iu" or stored.ndim != 1:
        raise damaged(f"{metadata.path} names no layers")
    inputs = stored.tolist()
    if architecture == EAGLE3:
        # Rows of q and k stand as neighbouring pairs, as those of all models like Llama.
        return {"eagle_aux_hidden_state_layer_ids": inputs, "rope_is_neox_style": False}
    # A block scores next tokens by default where it has transitions, as llama.cpp reads it.
    mask = metadata.get("tokenizer.ggml.mask_token_id", int)
    stated = {"mask_token_id": mask, "target_layer_ids": [each - 1 for each in inputs]}
    return {"dflash_config": stated}
