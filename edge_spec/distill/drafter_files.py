"""Write a trained drafter to disk as its users read it: safetensors, config.json and, for an
ordinary draft, the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import DEFAULT_TEMPLATE, ModelInfo
from edge_spec.storage.atomic import as_storage_error

# Architectures whose layers a draft may consist of.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FACTORS = "factors"  # rotary frequencies listed one by one, as GGUF files hold them
_TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class Drafter:
    """The files of a drafter. config: config.json. texts: other files, by name."""

    tensors: Mapping[str, np.ndarray]
    config: dict[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write float32 as float16 where it fits. Raises StorageError where there is no space,
        OSError."""
        tensors = {name: _to_half(values) for name, values in self.tensors.items()}
        _write_safetensors(directory / "model.safetensors", tensors)
        texts = {"config.json": json.dumps(self.config, indent=2), **self.texts}
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")


def _to_half(values: np.ndarray) -> np.ndarray:
    fits = values.dtype == np.float32 and np.abs(values).max(initial=0) < _LARGEST_HALF
    return values.astype(np.float16) if fits else values


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    entries, end = {}, 0
    for name, each in tensors.items():
        begin, end = end, end + each.nbytes
        kind = _TYPES[each.dtype.name]
        entries[name] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for each in tensors.values():
            file.write(each.astype(each.dtype.newbyteorder("<")).tobytes())


def layers_config(config: ModelConfig, architecture: str, num_layers: int) -> dict[str, Any]:
    """Return config.json for layers of the target's shape."""
    written: dict[str, Any] = {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
    }
    scaling = rope_scaling_config(config)
    return written if scaling is None else {**written, "rope_scaling": scaling}


def draft_config(source: ModelInfo, num_layers: int) -> dict[str, Any]:
    """Return config.json for an ordinary draft of so many of the target's layers."""
    config = source.config
    written = layers_config(config, config.architecture, num_layers) | {
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.output_bias,
        "torch_dtype": "float16",
    }
    if config.architecture == "mistral":
        written["sliding_window"] = None  # transformers would take 4096
    if source.eos_ids:
        written["eos_token_id"] = list(source.eos_ids)
    if source.bos_id is not None:
        written["bos_token_id"] = source.bos_id
    return written


def text_files(source: ModelInfo) -> Mapping[str, str]:
    """Return tokenizer.json and tokenizer_config.json, which has the chat templates."""
    written: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.adds_bos,
    }
    written |= {name: token or None for name, token in source.special_tokens.items()}
    if source.chat_template is not None:
        templates = {DEFAULT_TEMPLATE: source.chat_template, **source.named_templates}
        written["chat_template"] = (
            [{"name": name, "template": each} for name, each in templates.items()]
            if source.named_templates
            else source.chat_template
        )
    return {
        "tokenizer.json": source.tokenizer_json(),
        "tokenizer_config.json": json.dumps(written, indent=2),
    }


def rope_scaling_config(config: ModelConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json; None without scaling, or for a kind that config.json
    cannot express."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == FACTORS:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }
