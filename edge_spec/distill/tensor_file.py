"""Arrays in the format safetensors, which says what there is and runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_spec.storage.atomic import as_storage_error

_KINDS = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises StorageError where there is no space, OSError."""
    header, at = {}, 0
    for name, values in tensors.items():
        ends = [at, at + values.nbytes]
        kind = _KINDS[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": ends}
        at += values.nbytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).data)
