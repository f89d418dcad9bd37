"""Metadata and tensors to a GGUF file, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import gguf
import numpy as np

from edge_spec.core.model import Progress
from edge_spec.exporters.gguf.metadata import Metadata, add_to_writer
from edge_spec.exporters.gguf.tensors import GgufTensor


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
