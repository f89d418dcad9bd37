"""Qwen 3.5's layer for multi-token prediction: `mtp.*` of a model's directory, and what llama.cpp's
converter makes of it, the block after the model's own in a GGUF file.

It is one of the model's layers that attend, with gates beside the queries, and reads the state
after the model's final norm. Norms of a directory have 1 taken away, those of GGUF have not.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.gguf_metadata import Metadata
from edge_spec.exporters.gguf_reader import GgufFile, first_architecture
from edge_spec.exporters.heads.eagle import mapping
from edge_spec.exporters.heads.head_files import HeadFiles
from edge_spec.exporters.heads.mtp import MtpForm, head_of_form
from edge_spec.exporters.mtp_layers import MTP_PREFIX, is_only_mtp, main_layers

_ARCHITECTURES = ("qwen35",)  # of GGUF
_NO_RETURN = ("qwen3_next",)  # model types with the same names, whose states are not taken back
_ROTATED = "partial_rotary_factor"
_DEFAULTS = MappingProxyType({"head_dim": 256, _ROTATED: 0.25})  # of config.json
_DIRECTORY = MtpForm(
    MTP_PREFIX,
    MappingProxyType(
        {"pre_fc_norm_embedding.weight": "embed_norm", "pre_fc_norm_hidden.weight": "state_norm"}
    ),
    in_layer="",
    norm_offset=1.0,
    is_gated=True,
)
_GGUF_NAMES = MappingProxyType(
    {
        "nextn.enorm.weight": "embed_norm",
        "nextn.hnorm.weight": "state_norm",
        "nextn.eh_proj.weight": "fc.weight",
        "nextn.shared_head_norm.weight": "norm",
        "nextn.shared_head_head.weight": "head",
        "nextn.embed_tokens.weight": "embed",
        "attn_norm.weight": "layers.0.input_norm",
        "post_attention_norm.weight": "layers.0.post_norm",
        "attn_q_norm.weight": "layers.0.q_norm",
        "attn_k_norm.weight": "layers.0.k_norm",
        "attn_q.weight": "layers.0.q.weight",
        "attn_k.weight": "layers.0.k.weight",
        "attn_v.weight": "layers.0.v.weight",
        "attn_output.weight": "layers.0.o.weight",
        "ffn_gate.weight": "layers.0.gate.weight",
        "ffn_up.weight": "layers.0.up.weight",
        "ffn_down.weight": "layers.0.down.weight",
    }
)
# Of config.json, by the keys of GGUF, with their types.
_KEYS: Mapping[str, tuple[str, type]] = MappingProxyType(
    {
        "hidden_size": ("embedding_length", int),
        "intermediate_size": ("feed_forward_length", int),
        "num_attention_heads": ("attention.head_count", int),
        "num_key_value_heads": ("attention.head_count_kv", int),
        "head_dim": ("attention.key_length", int),
        "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
        "rope_theta": ("rope.freq_base", float),
    }
)


def first_tensor(names: Iterable[str]) -> str | None:
    """Returns the name of a tensor of such a layer, where a directory has any."""
    return next((name for name in names if name.startswith(MTP_PREFIX)), None)


def directory_head(files: HeadFiles) -> EagleHead:
    """Raises as `open_head` does."""
    path, values = files.path, files.values
    text = {**_DEFAULTS, **values, **mapping(values, "text_config")}
    rope = mapping(text, "rope_parameters")
    text[_ROTATED] = rope.get(_ROTATED, text[_ROTATED])
    if values.get("model_type") in _NO_RETURN:
        raise UnsupportedModelError(
            f"{path} has a layer for multi-token prediction "
            f"({str(first_tensor(files.tensors))[:100]}) of a {values['model_type']} model: "
            "llama.cpp, where alone such models run, does not take back their recurrent "
            "states, as rejected draft tokens need it",
            remedy="Use a model of attention alone, or Qwen 3.5.",
        )
    return head_of_form(replace(files, values=text), _DIRECTORY)


def is_gguf_head(path: Path, is_targets: bool) -> bool:
    """Returns whether this file has such a layer and no more of a model. is_targets: it is the
    target's own file, of which the model itself is no draft."""
    if first_architecture(path) not in _ARCHITECTURES:
        return False
    try:
        file = GgufFile(path)
        first = main_layers(Metadata(file.metadata, path))
    except ModelFileError:
        return False  # whoever opens it as a model says what is wrong
    return first is not None and (is_targets or is_only_mtp(file.tensors))


def gguf_head(path: Path, target: ModelConfig, has_weights: bool) -> EagleHead:
    """Raises as `open_head` does."""
    file = GgufFile(path)
    metadata = Metadata(file.metadata, path)
    architecture = metadata.require("general.architecture", str)
    first = main_layers(metadata)
    form = MtpForm(f"blk.{first}.", _GGUF_NAMES, is_gated=True)
    if first is None or not any(name.startswith(form.prefix) for name in file.tensors):
        raise ModelFileError(
            f"{path} has no layer for multi-token prediction",
            remedy="Convert the model again, without --no-mtp, or use it without --draft.",
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", str)
    if scaling not in (None, "none"):
        raise UnsupportedModelError(
            f"{path} scales its rotary embedding by {reprlib.repr(scaling)}, which is not computed "
            "for its layer for multi-token prediction",
            remedy="Use the model without --draft.",
        )
    values = {
        name: metadata.require(f"{architecture}.{key}", kind) for name, (key, kind) in _KEYS.items()
    }
    values["num_hidden_layers"] = first
    rotated = metadata.get(f"{architecture}.rope.dimension_count", int)
    if rotated and values["head_dim"]:
        # Of which config.json states a share, that is rounded down.
        values[_ROTATED] = (rotated + 0.5) / values["head_dim"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    return head_of_form(HeadFiles(path, values, file.tensors, target, has_weights), form)
