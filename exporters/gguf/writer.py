"""Metadata and tensors to a GGUF file, one tensor in memory at a time.

An interrupted file goes on with the tensor that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np

from edge_spec.core.model import Progress
from edge_spec.exporters.gguf.metadata import Metadata, add_to_writer
from edge_spec.exporters.gguf.tensors import GgufTensor
from edge_spec.exporters.requests import converting
from edge_spec.storage.resumable import StepFile


def write_gguf(
    out: StepFile,
    architecture: str,
    metadata: Metadata,
    tensors: Sequence[GgufTensor],
    progress: Progress,
) -> None:
    """Raises ExportError for a tensor whose values do not fit its type."""
    if not out.steps:
        with TemporaryDirectory(dir=out.path.parent) as folder:
            out.write(_header(Path(folder) / "header", architecture, metadata, tensors))
        _pad(out)
        out.finish("header")
    num_kept = max(0, len(out.steps) - 1)
    what = converting(num_kept, len(tensors), "tensors")
    for i in range(num_kept, len(tensors)):
        out.write(tensors[i].encode().data)
        _pad(out)
        out.finish(tensors[i].name)
        progress(what, (i + 1) / len(tensors))


def _pad(out: StepFile) -> None:
    out.write(b"\0" * (-out.end % gguf.GGUF_DEFAULT_ALIGNMENT))


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
