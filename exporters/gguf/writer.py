"""Writes a GGUF file: what it says of its model, in the names of ggml's docs/gguf.md, and the
weights under GGUF's names, in llama.cpp's row order and in the types it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFValueType,
    LlamaFileType,
)

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, UnsupportedModelError, readable
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.families.family import LAYER_NAMES, MODEL_NAMES
from edge_spec.exporters.gguf_model_info import MODEL_KEYS, SAMPLING_KEYS
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.requests import (
    architecture_problem,
    gguf_architecture,
    other_export,
    other_runtime,
    require_plain,
)
from edge_spec.exporters.stored_tensor import StoredTensor

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


def _add_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
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


FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_WIDE = (GGMLQuantizationType.F32, GGMLQuantizationType.BF16)
_LARGEST_FLOAT16 = 65504.0  # also what the scale of a block is stored as
_EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")
_GGUF_MODEL_NAMES = {hf: gguf for gguf, hf in MODEL_NAMES.items()}
_GGUF_LAYER_NAMES = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One weight as the file will hold it; `row_order` picks its rows from Hugging Face's."""

    name: str
    source: StoredTensor
    kind: GGMLQuantizationType
    row_order: np.ndarray | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Returns the shape in bytes."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        *rows, columns = self.source.shape
        return (*rows, columns // block * block_bytes)

    def encode(self) -> np.ndarray:
        """uint8 [*stored_shape]; bit for bit the source's where that has the type already.

        Raises ExportError for values that the type cannot hold.
        """
        if self.source.kind == self.kind:
            stored = self.source.stored_rows()
        else:
            values = self.source.float32()
            if self.kind not in _WIDE and np.abs(values).max() > _LARGEST_FLOAT16:
                raise ExportError(
                    f"{self.name} has values that {self.kind.name} cannot hold",
                    remedy="Export with --quant BF16 or F32.",
                )
            with np.errstate(all="ignore"):  # of scales too small for float16, which become 0
                stored = quants.quantize(values, self.kind)
        rows = np.ascontiguousarray(stored).view(np.uint8)
        if self.row_order is not None:  # a bias has one item a row
            rows = rows.reshape(self.source.shape[0], -1)[self.row_order]
        return rows.reshape(self.stored_shape)


def gguf_tensors(
    checkpoint: StoredCheckpoint, kind: GGMLQuantizationType | None
) -> Iterator[GgufTensor]:
    """All weights of the model. kind: of the matrices; None leaves each in the type it has.

    As exporters/onnx does, keeps 8 bits in the embedding and the head where others have fewer.
    """
    config = checkpoint.config
    for name in checkpoint.names():
        source = checkpoint.tensors[name]
        stored_as = _kind(name, source, source.kind if kind is None else kind)
        yield GgufTensor(gguf_name(name), source, stored_as, _row_order(config, name, source))
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "linear":
        unscaled = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        factors = scaling.divisors(unscaled).astype(np.float32)
        kind = GGMLQuantizationType.F32
        yield GgufTensor(_ROPE_FACTORS, StoredTensor(factors.shape, kind, factors), kind)


def gguf_name(name: str) -> str:
    """Returns what GGUF calls a tensor that has the name `name` at Hugging Face."""
    if name in _GGUF_MODEL_NAMES:
        return _GGUF_MODEL_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{suffix}"


def _kind(name: str, source: StoredTensor, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(source.shape) == 1:
        return GGMLQuantizationType.F32  # llama.cpp wants norms and biases so
    if wanted == source.kind or wanted in FLOATS:
        return wanted
    if name in _EIGHT_BITS:
        wanted = GGMLQuantizationType.Q8_0
    if source.shape[-1] % GGML_QUANT_SIZES[wanted][0]:
        return GGMLQuantizationType.F16  # as llama.cpp does with rows that fill no block
    return wanted


def _row_order(config: ModelConfig, name: str, source: StoredTensor) -> np.ndarray | None:
    """q and k of "llama" are stored for an interleaved rotation: see gguf_source."""
    if gguf_architecture(config) != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return None
    halves = np.arange(source.shape[0]).reshape(-1, 2, config.head_dim // 2)
    order: np.ndarray = halves.swapaxes(1, 2).ravel()
    return order


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: Sequence[GgufTensor],
    progress: Progress,
) -> None:
    """Raises ExportError for a tensor whose values do not fit its type."""
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_metadata(writer, metadata)
        for tensor in tensors:
            shape = tensor.stored_shape
            size = int(np.prod(shape))
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for i, tensor in enumerate(tensors):
            writer.write_tensor_data(tensor.encode())
            progress("Converting the weights", (i + 1) / len(tensors))
    finally:
        writer.close()
