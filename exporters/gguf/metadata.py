"""Writes what a GGUF file says of its model, in the names of ggml's docs/gguf.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGUFValueType, LlamaFileType

from edge_spec.errors import UnsupportedModelError, readable
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf_model_info import MODEL_KEYS, SAMPLING_KEYS
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.requests import (
    architecture_problem,
    gguf_architecture,
    other_export,
    other_runtime,
    require_plain,
)

Metadata = dict[str, Any]  # text, lists of text, arrays of numbers, and scalars of Python or numpy
_COMPUTED = ("architecture", "alignment", "file_type", "quantization_version")
_NUMBERS = {
    "|b1": GGUFValueType.BOOL,
    "|u1": GGUFValueType.UINT8,
    "|i1": GGUFValueType.INT8,
    "<u2": GGUFValueType.UINT16,
    "<i2": GGUFValueType.INT16,
    "<u4": GGUFValueType.UINT32,
    "<i4": GGUFValueType.INT32,
    "<u8": GGUFValueType.UINT64,
    "<i8": GGUFValueType.INT64,
    "<f4": GGUFValueType.FLOAT32,
    "<f8": GGUFValueType.FLOAT64,
}
_SCALARS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
}
_DTYPES = {kind: dtype for dtype, kind in _NUMBERS.items()}


def stated_metadata(path: Path) -> Metadata:
    """Reads what a GGUF file says, its numbers in their stored types; of a directory, nothing."""
    if path.is_dir():
        return {}
    file = GgufFile(path)
    stated: Metadata = {}
    for key, value in file.metadata.items():
        dtype = _DTYPES.get(GGUFValueType(file.kinds[key]))
        stated[key] = value if dtype is None else np.array(value, dtype)[()]
    return stated


def require_writable(checkpoint: StoredCheckpoint) -> None:
    """Raises UnsupportedModelError for what is not written, and what llama.cpp cannot run."""
    config, other = checkpoint.config, other_runtime(checkpoint, "llamacpp")
    remedy = f"Convert it with llama.cpp's convert_hf_to_gguf.py, or use --runtime {other}."
    if config.encoder is not None:  # which no runtime here reads from GGUF
        remedy = f"Use --runtime {other}."
    require_plain(checkpoint, "GGUF", remedy)
    problem = architecture_problem(config)
    if problem is not None:
        raise UnsupportedModelError(
            f"llama.cpp does not run {checkpoint.path} as a {gguf_architecture(config)!r} model: "
            f"{problem}",
            remedy=other_export(checkpoint, "llamacpp"),
        )


def model_metadata(
    checkpoint: StoredCheckpoint, file_type: LlamaFileType, stated: Metadata
) -> Metadata:
    """Everything but the tokenizer. Raises UnsupportedModelError for what llama.cpp cannot run.

    stated: what the source says of its name, authors and licence, which is carried over.
    """
    require_writable(checkpoint)
    config = checkpoint.config
    architecture = gguf_architecture(config)
    path = checkpoint.path.resolve()
    computed = {f"general.{key}" for key in _COMPUTED}
    described = {k: v for k, v in stated.items() if k.startswith("general.") and k not in computed}
    metadata: Metadata = {
        "general.type": "model",
        "general.name": readable(path.stem if path.is_file() else path.name),
        **_sampling(checkpoint),
        **described,
        "general.file_type": int(file_type),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    of_model: Metadata = {key: getattr(config, field) for key, field in MODEL_KEYS.items()}
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        of_model["rope.scaling.type"] = "linear"
        of_model["rope.scaling.factor"] = config.rope_scaling.factor
    return metadata | {f"{architecture}.{key}": value for key, value in of_model.items()}


def _sampling(checkpoint: StoredCheckpoint) -> Metadata:
    """Returns what its makers recommend, in the types that llama.cpp's conversion writes."""
    stated = checkpoint.sampling.stated
    values: Metadata = {key: stated[name] for key, name in SAMPLING_KEYS.items() if name in stated}
    top_k = "general.sampling.top_k"
    return values | ({top_k: np.int32(values[top_k])} if top_k in values else {})


def add_to_writer(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    """Python's numbers as 32 bits; empty arrays, which gguf cannot write, not at all."""
    for key, value in metadata.items():
        if isinstance(value, np.ndarray) and value.size:
            kind = _NUMBERS[value.dtype.str]
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
        elif isinstance(value, np.generic):
            writer.add_key_value(key, value.item(), _NUMBERS[value.dtype.str])
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.STRING)
        elif isinstance(value, str):  # the name of a path may be no valid text
            valid = value.encode("utf-8", "replace")
            writer.add_key_value(key, valid, GGUFValueType.STRING)
        elif isinstance(value, bool | int | float):
            writer.add_key_value(key, value, _SCALARS[type(value)])
