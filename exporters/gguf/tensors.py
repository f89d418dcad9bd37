"""A checkpoint's weights under GGUF's names, in llama.cpp's row order and in the types it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import gguf
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.families.family import LAYER_NAMES, MODEL_NAMES
from edge_spec.exporters.gguf.metadata import Metadata, add_to_writer
from edge_spec.exporters.requests import gguf_architecture
from edge_spec.exporters.stored_tensor import StoredTensor

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
    with TemporaryDirectory(dir=path.parent) as folder:
        header = _header(Path(folder) / "header", architecture, metadata, tensors)
    with path.open("wb") as out:
        out.write(header)
        _pad(out)
        for i, tensor in enumerate(tensors):
            out.write(tensor.encode().data)
            _pad(out)
            progress("Converting the weights", (i + 1) / len(tensors))


def _pad(out: BinaryIO) -> None:
    out.write(b"\0" * (-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _header(
    path: Path, architecture: str, metadata: Metadata, tensors: Sequence[GgufTensor]
) -> bytes:
    """Returns what stands before the first tensor, made in the file `path`."""
    writer = gguf.GGUFWriter(path, architecture)
    add_to_writer(writer, metadata)
    for tensor in tensors:
        shape = tensor.stored_shape
        size = int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, tensor.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return path.read_bytes()
