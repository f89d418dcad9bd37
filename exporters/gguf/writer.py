"""Metadata and tensors to a GGUF file, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
        for i, tensor in enumerate(tensors):
            writer.write_tensor_data(tensor.encode())
            progress("Converting the weights", (i + 1) / len(tensors))
    finally:
        writer.close()
