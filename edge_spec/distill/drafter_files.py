"""Write a trained drafter to disk as its users read it: safetensors and config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.storage.atomic import as_storage_error

_TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class Drafter:
    """The files of a drafter. config: config.json."""

    tensors: Mapping[str, np.ndarray]
    config: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write float32 as float16 where it fits. Raises StorageError where there is no space,
        OSError."""
        tensors = {name: _to_half(values) for name, values in self.tensors.items()}
        _write_safetensors(directory / "model.safetensors", tensors)
        config = json.dumps(self.config, indent=2)
        (directory / "config.json").write_text(config, encoding="utf-8")


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


def layer_config(config: ModelConfig) -> dict[str, Any]:
    """Return config.json for a layer of the target's shape."""
    written: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
    }
    scaling = rope_scaling_config(config)
    return written if scaling is None else {**written, "rope_scaling": scaling}


def rope_scaling_config(config: ModelConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json; None without scaling, or for a kind that config.json
    cannot express."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "factors":  # listed one by one, as in GGUF files
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
